"""Lists of actions as PyTorch's compute-only CSV: what is written is read back, and a careless text is refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.tests.fakes.action_orders import action_orders, pipelines
from distrain.trainer.plan.layout.action_csv import read_action_csv, write_action_csv
from distrain.trainer.plan.layout.schedules import SCHEDULES, Action

Lists = tuple[tuple[Action, ...], ...]


def lists_of(name: str, stages: int, rounds: int = 2, chunks: int = 2) -> Lists:
    """Lists of a row of SCHEDULES, of micro-batches that it can have."""
    return tuple(tuple(SCHEDULES[name].actions(stage, stages, rounds * stages, chunks)) for stage in range(stages))


def refusal(text: str, stages: int) -> str | None:
    """Why a text is refused; None: it is read."""
    try:
        read_action_csv(text, stages)
    except ValueError as error:
        return str(error)
    return None


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(2, 4), st.integers(2, 3))
def test_a_schedule_is_read_as_it_was_written(name: str, stages: int, rounds: int, chunks: int) -> None:
    row, lists = SCHEDULES[name], lists_of(name, stages, rounds, chunks)
    read = read_action_csv(write_action_csv(lists, folded=row.folded), stages)
    assert read.actions == lists
    assert (read.chunks, read.micros) == (row.parts(chunks if row.chunked else 1), rounds * stages)
    assert read.folded == (row.folded and stages > 1)  # on one stage both placements are the same


@given(st.data())
def test_any_legal_order_is_read_as_it_was_written_and_refused_without_one_of_its_actions(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines())
    lists = data.draw(action_orders(pipeline))
    read = read_action_csv(write_action_csv(lists, folded=pipeline.folded), pipeline.stages)
    assert read.actions == tuple(map(tuple, lists))
    assert (read.chunks, read.micros, read.folded) == (pipeline.chunks, pipeline.micros, pipeline.folded and pipeline.stages > 1)
    short = lists[data.draw(st.integers(0, pipeline.stages - 1))]
    short.pop(data.draw(st.integers(0, len(short) - 1)))
    assert refusal(write_action_csv(lists, folded=pipeline.folded), pipeline.stages)


def test_a_cell_is_part_kind_and_micro_batch() -> None:
    lists = tuple(tuple(SCHEDULES["zb_v"].actions(stage, 2, 1, 2)) for stage in range(2))
    assert write_action_csv(lists, folded=True) == "0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2I0,2W0,1I0,1W0\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_pytorch_reads_every_cell_alike(name: str) -> None:
    parse = pytest.importorskip("torch.distributed.pipelining.schedules")._Action.from_str
    text = write_action_csv(lists_of(name, 3), folded=SCHEDULES[name].folded)
    for line in text.splitlines():
        for cell in line.split(","):
            action = parse(cell)
            assert f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}" == cell == repr(action)


def test_blank_cells_quotes_and_blank_lines_at_the_end_change_nothing() -> None:
    plain = read_action_csv("0F0,0B0\n1F0,1B0\n", 2)
    assert read_action_csv('\ufeff0F0,,,"0B0"\r\n , 1F0 ,1B0,,\r\n\r\n\n', 2) == plain


NO = "is not an action"
EXAMPLE = "write the part of the model, F, B, I or W, and the micro-batch, as in 3F1"
ROWS = "write one row for each stage, the first stage first"
OWN = "leave messages and sharding out, for the trainer adds its own"
ALONE = "write the actions that it overlaps as cells of their own, one behind the other"
EVERY = "every part of the model runs all the micro-batches from 0 to 1"
ONCE = "a micro-batch has one F and one B on a part, or one F, one I and one W"
TAKEN = "part 0 of the model is on row 1 already: keep all actions of a part on one row"
GAP = "it runs part 2 of the model, and no row runs part 1: number the parts from 0 without gaps"
PLACES = "give it the parts 0, 2, or the parts 0, 3 where the parts go out and back"
NEEDS = "it needs the backward of micro-batch 0 on part 1, which stage 1 runs only after 1F1"
# fmt: off
REFUSED = pytest.mark.parametrize(("text", "stages", "says"), [
    ("",                                  1, f"the file has 0 rows and the pipeline 1 stage: {ROWS}"),
    ("0F0,0B0",                           2, f"the file has 1 row and the pipeline 2 stages: {ROWS}"),
    ("0F0,0B0\n,,\n2F0,2B0",              3, f"row 2: it has no actions: {EXAMPLE}"),
    ("0F0,0X0",                           1, f"row 1, cell 2: 0X0 {NO}: {EXAMPLE}"),
    ("0F0,0B٣",                           1, f"row 1, cell 2: 0B٣ {NO}: {EXAMPLE}"),
    ("0F0,0B9999999",                     1, f"row 1, cell 2: 0B9999999 {NO}: {EXAMPLE}"),
    ("stage of the pipeline,0F0",         1, f"row 1, cell 1: stage of the pipelin... {NO}: {EXAMPLE}"),
    ("0F0,,0b0",                          1, f"row 1, cell 3: 0b0 {NO}: write 0B0"),
    ("0F0;0B0",                           1, f"row 1, cell 1: 0F0;0B0 {NO}: separate cells by commas"),
    ("0F0 0B0",                           1, f"row 1, cell 1: 0F0 0B0 {NO}: separate cells by commas"),
    ("0F0,0SEND_F0,0B0",                  1, f"row 1, cell 2: 0SEND_F0 {NO}: {OWN}"),
    ("0F0,(0F1;0B0)OVERLAP_F_B",          1, f"row 1, cell 2: (0F1;0B0)OVERLAP_F_B {NO}: {ALONE}"),
    ("0F0,0B0\n1F0,0B1",                  2, f"row 2, cell 2: {TAKEN}"),
    ("0F0,0B0\n2F0,2B0",                  2, f"row 2, cell 1: {GAP}"),
    ("0F0,2F0,2B0,0B0\n1F0,1B0",          2, "row 2: it runs part 1 of the model and row 1 the parts 0, 2: give each row as many parts"),
    ("1F0,1B0\n0F0,0B0",                  2, "row 1: it runs part 1 of the model: give it part 0"),
    ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0",  2, f"row 1: it runs the parts 0, 1 of the model: {PLACES}"),
    ("0F0,0B0\n1F0,1F0,1B0",              2, "row 2, cell 2: stage 1 runs 1F0 twice: remove one of them"),
    ("0F0,0B0\n1F0,,1B0,1W0",             2, f"row 2, cell 4: stage 1 runs 1W0 after 1B0: {ONCE}"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1",      2, f"row 2: stage 1 never runs 1B1, or 1I1 and 1W1: {EVERY}"),
    ("0F0,,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", 2, f"row 1, cell 3: stage 0 waits for ever to run 0B0: {NEEDS}"),
])
# fmt: on


@REFUSED
def test_a_careless_text_is_refused_in_one_line(text: str, stages: int, says: str) -> None:
    assert refusal(text, stages) == says


def test_rows_that_mix_the_two_placements_are_refused() -> None:
    text = "".join(f"{out}F0,{back}F0,{back}B0,{out}B0\n" for out, back in ((0, 7), (1, 5), (2, 6), (3, 4)))
    with pytest.raises(ValueError, match="row 2: it runs the parts 1, 5 of the model: give it the parts 1, 6"):
        read_action_csv(text, 4)


@given(st.text(alphabet="0123FBIWfw,;(\n \t\"'-", max_size=40), st.integers(1, 3))
def test_any_text_is_read_or_refused_with_a_message_of_one_line(text: str, stages: int) -> None:
    says = refusal(text, stages)
    assert says is None or len(says.splitlines()) == 1


@given(st.data())
def test_a_changed_cell_is_refused_or_read_as_it_stands(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "interleaved", "zb_v"]))
    rows = [line.split(",") for line in write_action_csv(lists_of(name, 2), folded=SCHEDULES[name].folded).splitlines()]
    row, other = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    rows[row][data.draw(st.integers(0, len(rows[row]) - 1))] = data.draw(st.sampled_from([*rows[other], "", "0F9", "9F0"]))
    text = "".join(",".join(each) + "\n" for each in rows)
    if says := refusal(text, 2):
        assert says.startswith("row ")
    else:
        read = read_action_csv(text, 2)
        assert write_action_csv(read.actions, folded=read.folded) == text
