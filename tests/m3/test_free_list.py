"""The free list against Python's own."""

from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.block_manager import Block, FreeList


def test_first_freed_first_taken() -> None:
    blocks = [Block(i) for i in range(4)]
    free = FreeList(blocks)
    first = free.popleft()
    free.append(first)
    assert [free.popleft().block_id for _ in range(4)] == [1, 2, 3, 0]
    assert len(free) == 0


@given(st.lists(st.tuples(st.sampled_from(("take", "remove", "append")), st.integers(0, 7)), max_size=60))
def test_does_what_a_list_does(operations: list[tuple[str, int]]) -> None:
    blocks = [Block(i) for i in range(8)]
    free, model = FreeList(blocks), list(range(8))
    for operation, i in operations:
        if operation == "take" and model:
            assert free.popleft().block_id == model.pop(0)
        elif operation == "remove" and i in model:
            free.remove(blocks[i])
            model.remove(i)
        elif operation == "append" and i not in model:
            free.append(blocks[i])
            model.append(i)
        assert len(free) == len(model)
    assert [free.popleft().block_id for _ in range(len(free))] == model
