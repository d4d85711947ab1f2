"""Divisors of whole numbers, quick for large numbers too."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

FACTOR_LIMIT = 10**18  # numbers up to this are factored completely
TRIAL_LIMIT = 2000  # primes below this are found by division
# Bases with which Miller and Rabin's test is exact up to 3.3e24 (Sorenson and Webster 2017, doi:10.1090/mcom/3134).
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def divisors(number: int, most: int | None = None) -> list[int]:
    """The divisors of a number in ascending order, at most `most`; beyond `FACTOR_LIMIT` only those made of small primes."""
    return [each for each in _divisors(number) if most is None or each <= most]


def least_divisor(number: int, least: int) -> int:
    """The smallest divisor of a number that is at least `least`, which is at most the number."""
    small = next((each for each in range(least, min(number, least + TRIAL_LIMIT) + 1) if number % each == 0), None)
    return small or next((each for each in _divisors(number) if each >= least), number)


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    divisors = [1]
    for prime, exponent in _factors(number).items():
        divisors = [each * prime**power for each in divisors for power in range(exponent + 1)]
    return tuple(sorted(divisors))


def _factors(number: int) -> dict[int, int]:
    """The prime factors of a number and their exponents."""
    exponents: dict[int, int] = {}
    for prime in (2, *range(3, TRIAL_LIMIT, 2)):
        while number % prime == 0:
            exponents[prime] = exponents.get(prime, 0) + 1
            number //= prime
        if prime * prime > number:
            break
    left = [number] if 1 < number <= FACTOR_LIMIT else []
    while left:
        each = left.pop()
        if each < TRIAL_LIMIT * TRIAL_LIMIT or _is_prime(each):
            exponents[each] = exponents.get(each, 0) + 1
        else:
            factor = _proper_divisor(each)
            left += [factor, each // factor]
    return exponents


def _is_prime(number: int) -> bool:
    """Whether an odd number without small prime factors is prime, by Miller and Rabin's test."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _proper_divisor(number: int) -> int:
    """A proper divisor of a number that is not prime: Pollard's rho in Brent's form (1980, doi:10.1007/BF01933190)."""
    for step in range(1, number):
        slow = fast = 2
        product, turns, saved = 1, 1, 2
        while True:
            slow, done = fast, 0
            for _ in range(turns):
                fast = (fast * fast + step) % number
            while done < turns and (common := gcd(product, number)) == 1:
                saved = fast
                for _ in range(min(128, turns - done)):
                    fast = (fast * fast + step) % number
                    product = product * abs(slow - fast) % number
                done += 128
            turns *= 2
            if (common := gcd(product, number)) > 1:
                break
        if common == number:
            common, fast = 1, saved
            while common == 1:
                fast = (fast * fast + step) % number
                common = gcd(abs(slow - fast), number)
        if common < number:
            return common
    return number
