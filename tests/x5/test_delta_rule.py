"""x5.1 and x5.2: the delta rule, a token at a time and a chunk at a time."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from folovllm.electives.hybrid.delta_rule import CHUNK, delta_rule, delta_rule_chunk, delta_rule_step, l2norm
from tests.tiny import worked_case

HALF = -0.6931472  # log(1/2)


def some(n: int, heads: int = 3, dk: int = 8, dv: int = 5, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A state [H, Dk, Dv], and queries, keys, values, `g` and `beta` of n tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gates = (-0.3 * torch.rand(n, heads, generator=generator), torch.rand(n, heads, generator=generator))
    queries, keys = l2norm(normal(n, heads, dk)), l2norm(normal(n, heads, dk))
    return normal(heads, dk, dv), queries, keys, normal(n, heads, dv), *gates


def by_steps(state: torch.Tensor, *tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule by its formula, written out with loops over tokens and heads, in float64."""
    state, outputs = state.double(), []
    for query, key, value, g, beta in zip(*(x.double() for x in tokens), strict=True):
        heads = []
        for h in range(len(state)):
            faded = state[h] * g[h].exp()
            state[h] = faded + beta[h] * torch.outer(key[h], value[h] - key[h] @ faded)
            heads.append(query[h] @ state[h])
        outputs.append(torch.stack(heads))
    return torch.stack(outputs).float(), state.float()


class TestStep:
    def test_a_worked_case(self) -> None:
        """One head, two dimensions of keys, one of values."""
        state = torch.tensor([[[[4.0], [2.0]]]])  # for the key (1, 0) it holds 4, for (0, 1) it holds 2
        key, query = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 1.0]]])
        value, g, beta = torch.tensor([[[6.0]]]), torch.tensor([[HALF]]), torch.tensor([[0.5]])
        out, after = delta_rule_step(state, query, key, value, g, beta)
        says = "all fades to 2 and 1; the answer for (1, 0) moves from 2 halfway to 6, to 4; the query adds both: 4 + 1"
        got = {n: [round(x, 4) for x in t.flatten().tolist()] for n, t in (("state", after), ("out", out))}
        worked_case("x5.1", got, {"state": [4.0, 1.0], "out": [5.0]}, says)

    @pytest.mark.parametrize("decay", [0.0, -1.0, -5.0, -200.0])
    def test_any_decay(self, decay: float) -> None:
        """From none to one that leaves nothing; each head has another share."""
        state, queries, keys, values, g, beta = some(1)
        g = torch.full_like(g, decay)
        expected = by_steps(state, queries, keys, values, g, beta)
        got = delta_rule_step(state[None], queries, keys, values, g, beta)
        assert torch.allclose(got[0], expected[0], atol=1e-5), f"the state fades by exp({decay}), whatever that is"
        assert torch.allclose(got[1][0], expected[1], atol=1e-5), f"the state fades by exp({decay}), whatever that is"

    def test_many_heads_and_sequences(self) -> None:
        """Each sequence and each head has a state of its own."""
        states = torch.stack([some(1, seed=s)[0] for s in range(4)])
        tokens = [torch.cat(parts) for parts in zip(*(some(1, seed=s)[1:] for s in range(4)), strict=True)]
        out, after = delta_rule_step(states, *tokens)
        for s in range(4):
            expected, state = by_steps(*some(1, seed=s))
            says = f"of sequence {s} is not that of the formula: each head of each sequence has its own decay, share and state"
            torch.testing.assert_close(out[s : s + 1], expected, msg=f"the output {says}")
            torch.testing.assert_close(after[s], state, msg=f"the state {says}")

    def test_the_state_that_was_given_stays(self) -> None:
        """Where nothing fades, and where nothing is written, too."""
        state, query, key, value, *gates = some(1)
        before, nothing = state.clone(), torch.zeros(1, 3)
        for g in gates[0], nothing:
            for beta in gates[1], nothing:
                given = (query, key, value, g, beta)
                copies = [x.clone() for x in given]
                delta_rule_step(state[None], *given)
                says = f"with g {g.tolist()} and beta {beta.tolist()}"
                assert torch.equal(state, before), f"{says} the state was written over: a snapshot may be in it"
                assert all(map(torch.equal, given, copies)), f"{says} an argument was written over"

    def test_keys_of_any_length_and_sums_that_grow(self) -> None:
        """Keys twice as long as a unit: with beta 1 each token overshoots by three times, and the formula says by how much."""
        state, query, key, value, g, _ = some(12)
        tokens = query, 2 * key, value, torch.zeros_like(g), torch.ones_like(g)
        expected, after = by_steps(state, *tokens)
        for i in range(12):
            out, new = delta_rule_step(state[None], *(x[i : i + 1] for x in tokens))
            says = f"token {i} of keys of length 2: not what the formula gives, which holds for keys of any length"
            torch.testing.assert_close(out[0], expected[i], rtol=1e-3, atol=1e-3, msg=says)
            state = new[0]
        torch.testing.assert_close(state, after, rtol=1e-3, atol=1e-3, msg="outputs are right, and the state is not")

    @pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 3), (2, 1, 4), (2, 4, 1)], ids=str)
    def test_sizes_that_are_equal_or_one(self, sizes: tuple[int, int, int]) -> None:
        """As many sequences as heads; with equal Dk and Dv a state that is turned over has the right shape."""
        heads, dk, dv = sizes
        parts = [some(1, heads, dk, dv, seed=s) for s in range(heads)]
        rest = (torch.cat(x) for x in zip(*(p[1:] for p in parts), strict=True))
        out, after = delta_rule_step(torch.stack([p[0] for p in parts]), *rest)
        for s in range(heads):
            expected, state = by_steps(*parts[s])
            says = f"of sequence {s} of {heads}, {heads} heads, Dk = {dk}, Dv = {dv}, is not that of the formula"
            torch.testing.assert_close(out[s : s + 1], expected, msg=f"the output {says}")
            torch.testing.assert_close(after[s], state, msg=f"the state {says}")

    def test_large_numbers(self) -> None:
        """Nothing is cut: a state and values 4,096 times as large give outputs and a state that are so, too."""
        state, query, key, value, *gates = some(1)
        out, after = delta_rule_step(4096 * state[None], query, key, 4096 * value, *gates)
        right = by_steps(state, query, key, value, *gates)
        for name, got, small in zip(("outputs", "state"), (out, after[0]), right, strict=True):
            says = f"state and values are 4,096 times as large, {name} are not"
            torch.testing.assert_close(got / 4096, small, rtol=1e-4, atol=1e-4, msg=says)

    def test_a_key_finds_its_value(self) -> None:
        """With beta 1 and no decay a key's answer is its value, whatever was there, and a key at right angles keeps its own."""
        state, _, _, value, _, _ = some(1)
        key = torch.zeros(1, 3, 8)
        key[..., 2] = 1.0
        out, after = delta_rule_step(state[None], key, key, value, torch.zeros(1, 3), torch.ones(1, 3))
        torch.testing.assert_close(out, value, msg="the query is the key, so it reads the new value")
        torch.testing.assert_close(after[0, :, 3], state[:, 3], msg="another key's answer changed")

    def test_a_closed_gate_writes_nothing(self) -> None:
        state, query, key, value, g, _ = some(1)
        for strength in 1.0, 50.0, 200.0:
            _, after = delta_rule_step(state[None], query, key, value, strength * g, torch.zeros(1, 3))
            says = f"beta is 0, g {strength * g}: the state only fades, by exp(g) however little that leaves"
            expected = state * (strength * g[0]).exp()[:, None, None]
            torch.testing.assert_close(after[0], expected, rtol=1e-5, atol=0, msg=says)


class TestChunk:
    def test_a_worked_case(self) -> None:
        """Two tokens with one key: the second one finds what the first has written, faded."""
        state = torch.tensor([[[8.0]]])
        ones = torch.ones(2, 1, 1)
        value, g, beta = torch.tensor([[[6.0]], [[10.0]]]), torch.full((2, 1), HALF), torch.full((2, 1), 0.5)
        out, after = delta_rule_chunk(state, ones, ones, value, g, beta)
        says = "8 fades to 4 and moves halfway to 6: 5; that fades to 2.5 and moves halfway to 10: 6.25"
        got = {"out": [round(x, 4) for x in out.flatten().tolist()], "state": round(after.item(), 4)}
        worked_case("x5.2", got, {"out": [5.0, 6.25], "state": 6.25}, says)

    @pytest.mark.parametrize("n", [1, 2, 7, CHUNK])
    def test_it_equals_n_steps(self, n: int) -> None:
        out, state = delta_rule_chunk(*some(n))
        expected, after = by_steps(*some(n))
        assert out.shape == expected.shape, f"outputs are [n, H, Dv], not {list(out.shape)}"
        far = ((out - expected).abs() > 1e-4).flatten(1).any(1).tolist()
        says = f"token {far.index(True) if any(far) else n - 1} of {n} is the first that gets another output than by single steps"
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4, msg=says)
        says = f"all {n} outputs are right, and the state after them is not that of {n} single steps"
        torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-4, msg=says)

    @pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 3, 3, 3), (5, 2, 1, 4), (5, 2, 4, 1)], ids=str)
    def test_sizes_that_are_equal_or_one(self, sizes: tuple[int, int, int, int]) -> None:
        """As many tokens as heads and numbers: what is turned over has the right shape."""
        given = some(*sizes)
        for name, got, expected in zip(("outputs", "state"), delta_rule_chunk(*given), by_steps(*given), strict=True):
            says = f"{name} of n, H, Dk, Dv = {sizes} are not those of single steps"
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=says)

    def test_large_numbers(self) -> None:
        """Nothing is cut: a state and values 4,096 times as large give outputs and a state that are so, too."""
        state, query, key, value, *gates = some(7)
        large = delta_rule_chunk(4096 * state, query, key, 4096 * value, *gates)
        right = by_steps(state, query, key, value, *gates)
        for name, got, small in zip(("outputs", "state"), large, right, strict=True):
            says = f"state and values are 4,096 times as large, {name} are not"
            torch.testing.assert_close(got / 4096, small, rtol=1e-4, atol=1e-4, msg=says)

    def test_keys_of_any_length(self) -> None:
        state, query, key, value, g, beta = some(9)
        given = state, query, 1.5 * key, value, g, beta
        says = "keys of length 1.5: the formulas hold for keys of any length"
        for got, expected in zip(delta_rule_chunk(*given), by_steps(*given), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, msg=says)

    def test_a_chunk_begins_where_the_one_before_it_ended(self) -> None:
        state, *tokens = some(10)
        expected, after = by_steps(state, *tokens)
        for part in slice(0, 3), slice(3, 4), slice(4, 10):
            out, state = delta_rule_chunk(state, *(x[part] for x in tokens))
            says = f"tokens {part.start} to {part.stop - 1}, from the state after those before them"
            torch.testing.assert_close(out, expected[part], rtol=1e-4, atol=1e-4, msg=says)
        torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-4, msg="the state after three chunks")

    def test_decays_of_all_strengths_side_by_side(self) -> None:
        """Each head and token has another: none, little, and one that leaves nothing."""
        state, query, key, value, _, beta = some(CHUNK)
        strengths = torch.tensor([0.0, -1e-3, -0.5, -30.0, -300.0])
        g = strengths[torch.randint(5, (CHUNK, 3), generator=torch.Generator().manual_seed(3))]
        given = state, query, key, value, g, beta
        for name, got, expected in zip(("outputs", "state"), delta_rule_chunk(*given), by_steps(*given), strict=True):
            says = f"{name}: g of 0 to -300 in one chunk; exponents are sums of g over tokens, none of them positive"
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, msg=says)

    def test_strong_decay_gives_no_nan(self) -> None:
        """exp(-c) of a whole chunk would be infinite; no exponent that is needed is positive."""
        state, query, key, value, _, beta = some(CHUNK)
        strong = torch.full((CHUNK, 3), -20.0)
        out, after = delta_rule_chunk(state, query, key, value, strong, beta)
        assert out.isfinite().all() and after.isfinite().all(), "a decay to almost nothing gives NaN or infinity"
        says = "each token leaves exp(-20) of the state: not those of single steps are "
        right = by_steps(state, query, key, value, strong, beta)
        for name, got, expected in zip(("outputs", "state"), (out, after), right, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=f"{says}the {name}")

    def test_the_state_that_was_given_stays(self) -> None:
        """Where nothing fades, too."""
        state, *tokens = some(5)
        for g in tokens[3], torch.zeros(5, 3):
            given = (state, *tokens[:3], g, tokens[4])
            copies = [x.clone() for x in given]
            delta_rule_chunk(*given)
            assert all(map(torch.equal, given, copies)), f"with g {g[0].tolist()} an argument was written over"

    def test_no_step_by_step(self) -> None:
        """As many operations of torch for 8 tokens as for 64, or, by doubling, a few more: a loop over tokens takes eight times as many."""
        few, many = (len(operations_of(n)) for n in (8, CHUNK))
        assert many < 3 * few, f"{few} operations of torch for 8 tokens and {many} for {CHUNK}: it goes token by token"


class Counter(TorchDispatchMode):
    """Keeps the operations of torch that run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def operations_of(n: int) -> list[object]:
    """What a chunk of `n` tokens takes."""
    tokens = some(n)
    with Counter() as counter:
        delta_rule_chunk(*tokens)
    return counter.seen


def test_a_long_prompt_in_chunks() -> None:
    n = 2 * CHUNK + 13
    out, state = delta_rule(*some(n))
    expected, after = by_steps(*some(n))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-4)
