"""Virtual hosts: namespaces of this machine, each with its own network, processes, mounts, name, shared memory and sshd.

By hand, as root, with openssh-server, pdsh, iproute2 and util-linux installed:

    python -m distrain.scripts.virtual_hosts 2 /tmp/hosts    2 hosts, host0 and host1, until Ctrl-C; it prints how to enter them
    nsenter ... distrain fit conf=quickstart launch=deepspeed launch.hostfile=/tmp/hosts/hostfile ...

tests/fakes/virtual_slurm.py runs a Slurm on them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from .show_help import show_help

T = TypeVar("T")
NETWORK = "10.77.0."  # the hosts are 10.77.0.10 and so on, in a network namespace of their own
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh", "ip", "unshare", "nsenter")
NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")
PATIENCE = 30.0  # seconds for a host to answer
# The default key exchange (sntrup761) takes five times the processor time of this one, and a start on several hosts makes many connections.
SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile /root/.ssh/authorized_keys
StrictModes no
MaxStartups 100
UseDNS no
KexAlgorithms curve25519-sha256
PrintMotd no
"""
# A host's first process. It becomes the sshd, which reaps orphans. Bash reads root's .bashrc at each connection: that of this machine may
# run programs (`pyenv init` takes 0.2 s of processor time), print, or change PATH; the hosts have an empty one.
INIT = """\
set -e
mount --make-rprivate /
mount -t proc proc /proc
hostname {name}
mount --bind {hosts} /etc/hosts
mkdir -p /root/.ssh /run/sshd
mount --bind {ssh} /root/.ssh
[ ! -e /root/.bashrc ] || mount --bind /dev/null /root/.bashrc
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
read -r go
exec {sshd} -D -f {folder}/sshd_config -E {folder}/sshd.log
"""


def missing_tools() -> str:
    """Return why this machine can't make virtual hosts; "" where it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [tool for tool in PROGRAMS if shutil.which(tool, path=path) is None]
    if os.geteuid() != 0:
        return "virtual hosts are namespaces, which need root"
    if absent:
        return f"{', '.join(absent)} not found: apt-get install openssh-server pdsh iproute2 util-linux"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "mount", "-t", "proc", "proc", "/proc"], capture_output=True, text=True)
    return f"namespaces can't be made: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, kw_only=True)
class VirtualHost:
    """A virtual host; `pid` is its first process, as seen from this machine."""

    name: str
    address: str
    pid: int
    shell: subprocess.Popen[bytes]

    def command_line(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on the host from here."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={os.getcwd()}", *command]

    def run(self, *command: str) -> str:
        """Run a command on the host; return its output."""
        return subprocess.run(self.command_line(command), check=True, capture_output=True, text=True).stdout

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on the host, with its output in a pipe."""
        none, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(self.command_line(command), env=dict(environment), stdin=none, stdout=pipe, stderr=both, text=True)

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes, except its sshd's, by process id on this machine."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if int(process.name) != self.pid and os.readlink(process / "ns" / "pid") == space:
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
        return {pid: words for pid, words in found.items() if words and "sshd" not in words.split()[0]}


class VirtualHosts:
    """`count` hosts on one switch, with the same files; `host0` can ssh to all. Nothing is left when it is closed."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder.resolve()
        self.hosts: list[VirtualHost] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        (self.folder / "ssh").mkdir(parents=True, mode=0o700)
        self._write_keys(count)
        try:
            self._switch = self._pid(self._unshare(["sleep", "infinity"], "--net", "--pid"))
            self._run_ip(self._switch, "link add switch type bridge", "link set switch up")
            for number in range(count):
                self.hosts.append(self._start_host(number))
            for host in self.hosts:
                assert host.shell.stdin is not None
                host.shell.stdin.write(b"go\n")
                host.shell.stdin.close()
            self._wait(self.hosts)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_hostfile(self, slots: int) -> Path:
        """Write a hostfile of all hosts; return its path."""
        file = self.folder / "hostfile"
        file.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return file

    def set_link(self, number: int, state: str) -> None:
        """Take a host's link at the switch "up" or "down"."""
        self._run_ip(self._switch, f"link set port{number} {state}")
        if state == "up":
            self._wait([self.hosts[number]])

    def close(self) -> None:
        """End all hosts: a namespace ends with its first process, and that with its unshare."""
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.wait()

    def _write_keys(self, count: int) -> None:
        """Write a key for the user and one per host, known_hosts and /etc/hosts."""
        ssh = self.folder / "ssh"
        keys = [ssh / "id_ed25519", *(self.folder / f"host{number}" / "host_key" for number in range(count))]
        for key in keys:
            key.parent.mkdir(exist_ok=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        known = [f"host{number},{NETWORK}{10 + number} {key.with_suffix('.pub').read_text()}" for number, key in enumerate(keys[1:])]
        (ssh / "known_hosts").write_text("".join(known))
        names = [f"{NETWORK}{10 + number} host{number}" for number in range(count)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def _start_host(self, number: int) -> VirtualHost:
        name, address, folder = f"host{number}", f"{NETWORK}{10 + number}", self.folder / f"host{number}"
        (folder / "sshd_config").write_text(SSHD.format(address=address, folder=folder))
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        script = INIT.format(name=name, hosts=self.folder / "hosts", ssh=self.folder / "ssh", folder=folder, sshd=sshd)
        shell = self._unshare(["bash", "-c", script], *NAMESPACES)
        pid = self._pid(shell)
        self._run_ip(self._switch, f"link add port{number} type veth peer name eth0 netns {pid}")
        self._run_ip(pid, f"addr add {address}/24 dev eth0", "link set eth0 up")
        self._run_ip(self._switch, f"link set port{number} master switch", f"link set port{number} up")
        return VirtualHost(name=name, address=address, pid=pid, shell=shell)

    def _unshare(self, command: Sequence[str], *namespaces: str) -> subprocess.Popen[bytes]:
        words = ["unshare", *namespaces, "--fork", "--kill-child", *command]
        log = (self.folder / "init.log").open("ab")
        self._processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log))
        log.close()
        return self._processes[-1]

    def _pid(self, shell: subprocess.Popen[bytes]) -> int:
        """Return the first process of new namespaces."""
        listed = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        return int(_wait_for(lambda: listed.read_text().split())[0])

    def _run_ip(self, pid: int, *lines: str) -> None:
        for line in lines:
            subprocess.run(["nsenter", f"--target={pid}", "--net", "ip", *shlex.split(line)], check=True)

    def _wait(self, hosts: Sequence[VirtualHost]) -> None:
        """Wait until each of these accepts ssh connections of the first host."""
        for host in hosts:
            program = f"import socket; socket.create_connection(({host.address!r}, 22), 2).close()"
            words = self.hosts[0].command_line([sys.executable, "-I", "-S", "-c", program])
            _wait_for(partial(_succeeds, words))


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def _wait_for(condition: Callable[[], T]) -> T:
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until, "the hosts do not start"
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    show_help(__doc__)
    with VirtualHosts(int(sys.argv[1]), Path(sys.argv[2])) as hosts:
        hosts.write_hostfile(2)
        for each in hosts.hosts:
            print(shlex.join(each.command_line([])))
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
