"""Train the embedded draft heads. `python -m tools.train_tiny.heads eagle3|mtp --out DIR --minutes 3 --device cuda`.

A head learns from what its target wrote: our own engine writes the answers, at temperature 0 and some at 0.8. In each step of the
training the target's hidden states and distributions are computed anew, and the head is unrolled: its first output is the next
input, as in a chain of drafts (EAGLE-3's "training-time test"). So it learns to read its own hidden states, too.

`eagle3` writes the folder of a head for `stories-5m`, as heads are published; `mtp` a copy of `stories-hybrid` with the head in it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from folovllm import LLM, SamplingParams

from .data import IGNORE, ROW, pack
from .distil import LOW, distance
from .documents import END, SEPARATOR, prompt
from .stories import request_and_story

ASSETS = Path(__file__).parents[2] / "folovllm" / "assets"
TARGETS = {"eagle3": "stories-5m", "mtp": "stories-hybrid"}
HELD_OUT = 8  # rows at temperature 0 that are not trained on
THETA = 10_000.0
FADE = 0.8  # how much a later step of the chain counts, beside the one before


@dataclass
class Run:
    """The settings of a run."""

    kind: str
    out: Path
    minutes: float
    steps: int
    rows: int
    width: int
    answers: int
    unroll: int
    layers: tuple[int, ...]
    vocabulary: int
    matrices: float
    others: float
    device: str


# --- text that the target wrote ---


def written(run: Run) -> tuple[Tensor, Tensor]:
    """Rows of whole chats [rows, ROW], and which of their tokens the target wrote; the first rows are at temperature 0."""
    engine: dict[str, Any] = {"device": run.device, "max_num_seqs": 512 if run.device == "cuda" else 16, "seed": 0}
    with LLM(TARGETS[run.kind], max_model_len=1024, use_tqdm=False, **engine) as llm:
        greedy = documents(llm, 11, run.answers, 0.0)
        drawn = documents(llm, 12, run.answers // 2, 0.8)
    rows = [pack(iter(found), len(found)) for found in (greedy, drawn)]
    ids, labels = (np.concatenate(parts).astype(np.int64) for parts in zip(*rows, strict=True))
    return torch.from_numpy(ids), torch.from_numpy(labels != IGNORE)


def documents(llm: LLM, seed: int, count: int, temperature: float) -> list[tuple[list[int], list[int]]]:
    """Chats of one turn about stories, ids and labels: requests by the grammar, answers by the target."""
    rng = Random(seed)
    prompts = [llm.engine.tokenizer.encode(prompt(request_and_story(rng)[0])) for _ in range(count)]
    end, behind = (llm.engine.tokenizer.encode(text) for text in (END, "\n" + SEPARATOR))
    outputs = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=200, seed=seed))
    found = []
    for given, output in zip(prompts, outputs, strict=True):
        own = [*output.outputs[0].token_ids]
        own += [] if own[-len(end) :] == end else end
        found.append(([*given, *own, *behind], [IGNORE] * len(given) + own + [IGNORE] * len(behind)))
    return found


# --- the heads, with the names of the published tensors ---


def norm(hidden: int, zero_centred: bool) -> nn.Module:
    return Qwen3_5RMSNorm(hidden) if zero_centred else nn.RMSNorm(hidden, eps=1e-6)


def turned(x: Tensor) -> Tensor:
    """RoPE: [rows, heads, n, D] at positions 0 to n - 1."""
    d = x.shape[-1]
    frequencies = THETA ** (-torch.arange(0, d, 2, device=x.device).float() / d)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device).float(), frequencies)
    (a, b), cos, sin = x.float().chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Eagle3(nn.Module):
    """`folovllm.electives.spec_decode.eagle3.Eagle3Head`, to be trained."""

    def __init__(self, target: Any, layers: tuple[int, ...], ids: Tensor) -> None:
        super().__init__()
        c = target.config
        self.heads, self.kv_heads, self.aux, self.ids = c.num_attention_heads, c.num_key_value_heads, layers, ids
        hidden, last = c.hidden_size, target.model.layers[-1]
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.midlayer = layer = nn.Module()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(layer, name, norm(hidden, False))
        layer.self_attn, layer.mlp = nn.Module(), deepcopy(last.mlp)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(last.self_attn, name).weight
            new = nn.Linear(2 * hidden, len(old), bias=False)
            new.weight.data.copy_(torch.cat((old, old), 1) / 2)
            setattr(layer.self_attn, name, new)
        layer.self_attn.o_proj = deepcopy(last.self_attn.o_proj)
        self.norm, self.lm_head = deepcopy(target.model.norm), nn.Linear(hidden, len(ids), bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.eye(hidden) / len(layers)] * len(layers), 1))
            self.lm_head.weight.copy_(target.lm_head.weight[ids])

    def begin(self, states: tuple[Tensor, ...]) -> Tensor:
        """The target's states before each layer -> what a chain carries."""
        out: Tensor = self.fc(torch.cat([states[i] for i in self.aux], -1))
        return out

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1), hidden

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values: [rows, heads, n, D]."""
        attention = self.midlayer.self_attn
        q, k, v = (split(getattr(attention, f"{name}_proj")(x), self.heads_of(name)) for name in "qkv")
        return turned(q), turned(k), v

    def heads_of(self, name: str) -> int:
        return self.heads if name == "q" else self.kv_heads

    def end(self, x: Tensor, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention's result [rows, n, Hq D] -> what a chain carries on."""
        layer = self.midlayer
        residual = residual + layer.self_attn.o_proj(attended)
        out: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out

    def logits(self, carried: Tensor) -> Tensor:
        """Over the draft's vocabulary."""
        out: Tensor = self.lm_head(self.norm(carried))
        return out


class Mtp(nn.Module):
    """The head in a checkpoint of Qwen3.5, to be trained. Embedding and head are the target's, and stay as they are."""

    def __init__(self, target: Any, ids: Tensor) -> None:
        super().__init__()
        c = target.config
        self.heads, self.kv_heads, self.ids, hidden = c.num_attention_heads, c.num_key_value_heads, ids, c.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, True), norm(hidden, True)
        last = max(i for i, kind in enumerate(c.layer_types) if kind == "full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(c, last)])
        self.layers[0].load_state_dict(target.model.layers[last].state_dict())
        self.norm = deepcopy(target.model.norm)
        self._head = [target.lm_head]  # in a list: no module of this one
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.eye(hidden) / 2] * 2, 1))

    def begin(self, states: tuple[Tensor, ...]) -> Tensor:
        """The target's last state, behind its norm."""
        return states[-1]

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        residual = self.fc(both)
        return self.layers[0].input_layernorm(residual), residual

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and turned, and values."""
        attention: Any = self.layers[0].self_attn
        q = split(attention.q_proj(x), self.heads).chunk(2, -1)[0]
        k, v = split(attention.k_proj(x), self.kv_heads), split(attention.v_proj(x), self.kv_heads)
        return turned(attention.q_norm(q)), turned(attention.k_norm(k)), v

    def end(self, x: Tensor, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention's result, through its gate, the MLP and the last norm."""
        layer: Any = self.layers[0]
        gate = split(layer.self_attn.q_proj(x), self.heads).chunk(2, -1)[1].transpose(1, 2).flatten(2)
        residual = residual + layer.self_attn.o_proj(attended * torch.sigmoid(gate))
        out: Tensor = self.norm(residual + layer.mlp(layer.post_attention_layernorm(residual)))
        return out

    def logits(self, carried: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        out: Tensor = self._head[0](carried)
        return out


Head = Eagle3 | Mtp


def split(x: Tensor, heads: int) -> Tensor:
    """[rows, n, heads D] -> [rows, heads, n, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def unrolled(head: Head, embedded: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
    """What the head carries on in each step of a chain, [rows, n, H], all positions at once.

    Pair p is (token p + 1, hidden state p). In step j its hidden state is what step j - 1 carried on from pair p - 1, and it
    attends to the true pairs up to p - j, to pair p - j + 1 of step 1, and so on up to itself.
    """
    n, true, later = embedded.shape[1], None, list[tuple[Tensor, Tensor]]()
    ahead = torch.arange(n, device=embedded.device)
    for j in range(steps):
        x, residual = head.inputs(embedded, hidden)
        q, k, v = head.qkv(x)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        true = true or (k, v)
        later += [(k, v)] if j else []
        scores = (q @ true[0].transpose(2, 3)).float() * q.shape[-1] ** -0.5
        scores = scores.masked_fill(ahead[None] > ahead[:, None] - j, -torch.inf)
        own = [(q * moved(key, j - i)).float().sum(-1, keepdim=True) for i, (key, _) in enumerate(later, 1)]
        shares = torch.cat([scores, *(s * q.shape[-1] ** -0.5 for s in own)], -1).softmax(-1).to(v.dtype)
        shares = shares.nan_to_num()  # the first pairs of later steps see nothing at all, and are not used
        attended = shares[..., :n] @ true[1]
        for i, (_, value) in enumerate(later, 1):
            attended = attended + shares[..., n + i - 1 : n + i] * moved(value, j - i)
        carried = head.end(x, attended.transpose(1, 2).flatten(2), residual)
        yield carried
        hidden = moved(carried, 1, 1)


def moved(x: Tensor, by: int, dim: int = 2) -> Tensor:
    """Each position gets what stands `by` positions before it."""
    return x.roll(by, dim) if by else x


# --- training ---


def step_of(head: Head, target: Any, ids: Tensor, learn: Tensor, unroll: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each step of a chain: the head's logits and the target's over the head's vocabulary, [m, Vd], and the true tokens.

    Pair p says what token p + 2 is: where the target wrote that one.
    """
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        with torch.no_grad():
            out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
            logits = target.lm_head(out.last_hidden_state)[:, 1:-1]
        states = tuple(state[:, :-2] for state in out.hidden_states)
        embedded = target.model.embed_tokens(ids[:, 1:-1])
        wanted, found = ids[:, 2:], []
        for j, carried in enumerate(unrolled(head, embedded, head.begin(states), unroll)):
            places = used(learn, j)
            given = head.logits(carried[places])
            found.append((given.float(), logits[places][:, head.ids].float(), wanted[places]))
    return found


def used(learn: Tensor, j: int) -> Tensor:
    """Which pairs step j learns from, [rows, n]. The first pairs have no step before them."""
    places = learn[:, 2:].clone()
    places[:, :j] = False
    return places


def loss_of(found: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The distance of the head's distributions from the target's, also at a low temperature, where the likeliest tokens count."""
    parts = [FADE**j * (distance(own, its) + 0.3 * distance(own, its, LOW)) for j, (own, its, _) in enumerate(found)]
    return torch.stack(parts).sum()


@torch.no_grad()
def tokens_a_step(head: Head, target: Any, ids: Tensor, learn: Tensor, k: int) -> tuple[float, list[float]]:
    """How many tokens a step with k drafts gives at temperature 0, and how often draft i is right behind right ones."""
    right = torch.zeros(k, *learn[:, 2:].shape, dtype=torch.bool, device=ids.device)
    for j, (given, _, wanted) in enumerate(step_of(head, target, ids, learn, k)):
        right[j][used(learn, j)] = head.ids[given.argmax(-1)] == wanted
    steps = written = 0
    for row in range(len(ids)):
        own = learn[row, 2:].tolist()
        p = 0
        while p < len(own):
            if not own[p]:
                p += 1
                continue
            n = next((j for j in range(k) if p + j >= len(own) or not right[j, row, p + j]), k)
            steps, written, p = steps + 1, written + n + 1, p + n + 1
    shares = [float(right[j][learn[:, 2:]].float().mean()) for j in range(k)]
    return written / max(1, steps), shares


def optimizers_of(head: Head, run: Run) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the layers' matrices, AdamW for norms and the head, each with its learning rate."""
    sorted_: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, weight in head.named_parameters():
        sorted_[weight.ndim == 2 and "lm_head" not in name].append(weight)
    muon = torch.optim.Muon(sorted_[True], weight_decay=0.0)
    return [(muon, run.matrices), (torch.optim.AdamW(sorted_[False], weight_decay=0.0), run.others)]


def train(run: Run, head: Head, target: Any, ids: Tensor, learn: Tensor) -> None:
    """Train until the steps or the minutes are over. The learning rates fall to zero by then."""
    optimizers, rng, start, losses = optimizers_of(head, run), torch.Generator().manual_seed(0), time.perf_counter(), []
    for step in range(run.steps):
        gone = max(step / run.steps, (time.perf_counter() - start) / 60 / run.minutes)
        if gone >= 1:
            break
        pick = torch.randint(HELD_OUT if len(ids) > HELD_OUT else 0, len(ids), (run.rows,), generator=rng)
        loss = loss_of(step_of(head, target, ids[pick], learn[pick], run.unroll))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer, most in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = most * min((step + 1) / 50, 1 - gone)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 100 == 0 or (run.steps < 100 and step % 5 == 0):
            mean, losses = float(torch.stack(losses).mean()), []
            print(f"step {step}  loss {mean:.4f}  {time.perf_counter() - start:.0f} s", flush=True)


# --- folders ---


def save_eagle3(head: Eagle3, target: Any, folder: Path) -> None:
    """The folder of a head, as SpecForge and vLLM know it."""
    c, ids = target.config, head.ids.cpu()
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": c.hidden_size,
        "target_hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": THETA,
        "max_position_embeddings": c.max_position_embeddings, "vocab_size": c.vocab_size, "draft_vocab_size": len(ids),
        "tie_word_embeddings": False, "dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [*head.aux]},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    tensors = {name: in_bf16(weight) for name, weight in head.state_dict().items()}
    if len(ids) < c.vocab_size:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_mtp(head: Mtp, target: Any, folder: Path) -> None:
    """A copy of the target's folder whose checkpoint holds the head, too, under the names that Qwen gives it."""
    shutil.copytree(ASSETS / TARGETS["mtp"], folder, dirs_exist_ok=True)
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith("mtp.")}
    tensors |= {f"mtp.{name}": in_bf16(weight) for name, weight in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    added = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**fields, **added}, indent=2) + "\n")


def in_bf16(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.bfloat16).contiguous()


def measured(run: Run, k: int = 3) -> str:
    """Tokens a step on fresh stories with the saved head, by our engine, at temperature 0."""
    model = TARGETS["eagle3"] if run.kind == "eagle3" else str(run.out)
    given = {"method": run.kind, "num_speculative_tokens": k, "adaptive": False}
    given |= {"model": str(run.out)} if run.kind == "eagle3" else {}
    rng = Random(99)
    with LLM(model, device=run.device, max_model_len=1024, use_tqdm=False, speculative_config=given) as llm:
        prompts = [prompt(request_and_story(rng)[0]) for _ in range(64)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=200))
        found: Any = llm.engine.scheduler
        speculation = found.speculation
    return (
        f"engine: {1 + speculation.num_accepted / speculation.num_drafts:.2f} tokens a step with drafts, k = {k}, "
        f"{speculation.num_drafts} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*TARGETS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="of training, beside about one of writing and measuring"
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=ROW, help="tokens of a row: fewer for a try on a CPU")
    parser.add_argument("--answers", type=int, default=16_384, help="at temperature 0, and half as many at 0.8")
    parser.add_argument("--unroll", type=int, default=3)
    parser.add_argument(
        "--layers", type=int, nargs=3, default=(1, 3, 5), help="eagle3: the target's layers that it reads"
    )
    parser.add_argument("--vocabulary", type=int, default=2048, help="eagle3: ids that it knows; 0: all")
    parser.add_argument("--matrices", type=float, default=0.02)
    parser.add_argument("--others", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args())
    run = Run(**{**given, "layers": tuple(given["layers"])})
    torch.manual_seed(0)
    start = time.perf_counter()
    ids, learn = (tensor[:, : run.width].to(run.device) for tensor in written(run))
    print(f"{int(learn.sum()):,} tokens in {len(ids)} rows, {time.perf_counter() - start:.0f} s", flush=True)
    target: Any = AutoModelForCausalLM.from_pretrained(ASSETS / TARGETS[run.kind], dtype=torch.float32).eval()
    known = torch.arange(target.config.vocab_size)
    if run.kind == "eagle3" and run.vocabulary:
        counts = Counter(ids[learn].tolist())
        known = torch.tensor(sorted(id_ for id_, _ in counts.most_common(run.vocabulary)))
        share = sum(counts[id_] for id_ in known.tolist()) / sum(counts.values())
        print(f"{len(known)} ids are {share:.4%} of the tokens", flush=True)
    head: Head = Eagle3(target, run.layers, known) if run.kind == "eagle3" else Mtp(target, known)
    target, head = target.to(run.device).requires_grad_(False), head.to(run.device).requires_grad_(True)
    head.ids = head.ids.to(run.device)
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters", flush=True)
    train(run, head, target, ids, learn)
    average, shares = tokens_a_step(head, target, ids[:HELD_OUT], learn[:HELD_OUT], 3)
    print(f"held out: {average:.2f} tokens a step; right: {', '.join(f'{share:.3f}' for share in shares)}", flush=True)
    if isinstance(head, Eagle3):
        save_eagle3(head, target, run.out)
    else:
        save_mtp(head, target, run.out)
    print(f"saved in {run.out}", flush=True)
    try:
        print(measured(run), flush=True)
    except ValueError as error:  # no engine here knows such a head
        print(f"not measured: {error}", flush=True)


if __name__ == "__main__":
    main()
