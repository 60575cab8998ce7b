"""Make the embedded mixture of experts out of the embedded model, on one core. `python -m tools.train_tiny.experts OUT`.

Each MLP's 768 neurons are dealt out to 8 experts, so that neurons which speak at the same tokens are together (Zhang et al.
2022, "MoEfication"). A router learns from the dense MLP which experts have most to say, and all of it then learns to answer
as before with a quarter of the neurons.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_outputs import ModelOutput

from .data import make_batch
from .distil import answer, distance, distil, load_teacher, load_tokenizer, run_of, tensors_of
from .train import model_config

NUM_EXPERTS, ASKED = 8, 2
BALANCE = 0.02  # weight of the loss that keeps any expert from being asked always, or never
SETTINGS = {"steps": 800, "seed": 6, "matrices": 0.01, "others": 1e-3}


def experts_config() -> Qwen3MoeConfig:
    """The dense model's shape, and 8 small MLPs in the place of each: 5.8M parameters, 3.1M for a token."""
    fields = model_config().to_dict()
    for name in ("model_type", "architectures", "layer_types", "transformers_version"):
        fields.pop(name, None)
    inner = fields["intermediate_size"] // NUM_EXPERTS
    config = Qwen3MoeConfig(
        **fields, moe_intermediate_size=inner, num_experts=NUM_EXPERTS, num_experts_per_tok=ASKED, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    return config


def seen_by_mlps(teacher: Qwen3ForCausalLM, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What goes into each layer's MLP [tokens, H], and how its neurons fire [tokens, I]."""
    seen: list[Tensor] = []
    parts = [part for layer in teacher.model.layers for part in (layer.mlp, layer.mlp.down_proj)]
    hooks = [part.register_forward_pre_hook(lambda _, given: seen.append(given[0][ids != 0])) for part in parts]
    with torch.no_grad():
        teacher.model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return list(zip(seen[::2], seen[1::2], strict=True))


def deal_out(likeness: Tensor) -> Tensor:
    """[I, E], how well each neuron suits each expert -> which expert gets it, [I]; all get equally many, the best pairs first."""
    most = len(likeness) // likeness.shape[1]
    expert, room = [-1] * len(likeness), [most] * likeness.shape[1]
    for pair in likeness.flatten().argsort(descending=True).tolist():
        neuron, e = divmod(pair, likeness.shape[1])
        if expert[neuron] < 0 and room[e]:
            expert[neuron], room[e] = e, room[e] - 1
    return torch.tensor(expert)


def groups_of(said: Tensor) -> list[Tensor]:
    """Balanced k-means of neurons by how much they say at each token, [tokens, I]: the neurons of each expert."""
    what = F.normalize((said - said.mean(0)).T, dim=1)  # [I, tokens]
    centers = what[torch.randperm(len(what))[:NUM_EXPERTS]]
    for _ in range(20):
        expert = deal_out(what @ centers.T)
        centers = F.normalize(torch.stack([what[expert == e].mean(0) for e in range(NUM_EXPERTS)]), dim=1)
    return [(expert == e).nonzero().flatten() for e in range(NUM_EXPERTS)]


def router_of(x: Tensor, spoken: Tensor) -> Tensor:
    """The router [E, H] that tells best from an MLP's input [tokens, H] how much each expert says beyond its mean [tokens, E]."""
    wanted = spoken / spoken.mean(0)
    wanted = wanted - wanted.mean(1, keepdim=True)
    ridge = 0.01 * len(x) * x.var() * torch.eye(x.shape[1])
    router = torch.linalg.solve(x.T @ x + ridge, x.T @ wanted).T
    return router / (x @ router.T).std()


@torch.no_grad()
def split(mlp: nn.Module, moe: nn.Module, x: Tensor, fired: Tensor) -> None:
    """Copy the neurons of a dense MLP to the experts of `moe`; what two of them say together gets the size of the whole."""
    groups = groups_of(fired.abs() * mlp.down_proj.weight.norm(dim=0))
    said = torch.stack([fired[:, g] @ mlp.down_proj.weight[:, g].T for g in groups], 1)  # [tokens, E, H]
    moe.gate.weight.copy_(router_of(x, said.norm(dim=-1)))
    weights, asked = (x @ moe.gate.weight.T).softmax(-1).topk(ASKED)
    weights = weights / weights.sum(-1, keepdim=True)
    heard = torch.einsum("tkh,tk->th", said[torch.arange(len(said))[:, None], asked], weights)
    scale = (said.sum(1) * heard).sum() / heard.square().sum()
    for e, group in enumerate(groups):
        moe.experts.gate_up_proj[e] = torch.cat([mlp.gate_proj.weight[group], mlp.up_proj.weight[group]])
        moe.experts.down_proj[e] = scale * mlp.down_proj.weight[:, group]


def student_of(teacher: Qwen3ForCausalLM, ids: Tensor) -> Qwen3MoeForCausalLM:
    """The teacher with its MLPs split by how they fire for `ids` [rows, ROW]; all else is copied."""
    student = Qwen3MoeForCausalLM(experts_config())
    student.load_state_dict({k: v for k, v in teacher.state_dict().items() if ".mlp." not in k}, strict=False)
    layers = zip(teacher.model.layers, student.model.layers, seen_by_mlps(teacher, ids), strict=True)
    for dense, sparse, seen in layers:
        split(dense.mlp, sparse.mlp, *seen)
    return student


def shares_of(logits: Tensor) -> Tensor:
    """The share of the choices that each expert gets, [E], from a router's logits [tokens, E]."""
    return logits.topk(ASKED).indices.flatten().bincount(minlength=NUM_EXPERTS) / (ASKED * len(logits))


def balance(out: ModelOutput, ids: Tensor) -> Tensor:
    """How unevenly a layer's experts are asked, mean over layers: 1 if all alike (Fedus et al. 2021, "Switch Transformers", 2.2).

    Shares of choices have no slope, so the router learns through its probabilities.
    """
    real = ids.flatten() != 0
    uneven = [shares_of(logits[real]) @ logits[real].float().softmax(-1).mean(0) for logits in out.router_logits]
    return BALANCE * NUM_EXPERTS * torch.stack(uneven).mean()


def measured(folder: Path, tokenizer: Tokenizer) -> dict[str, object]:
    """The perplexity of teacher and student on stories that nobody was trained on, and how often each expert is asked there."""
    ids, at = tensors_of(make_batch(tokenizer, 7, 0, rows=4, held_out=True))
    wanted, student = ids.flatten()[at + 1], Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        dense, _ = answer(load_teacher(), ids, at)
        sparse, out = answer(student, ids, at, output_router_logits=True)
    perplexity = {name: F.cross_entropy(x, wanted).exp().item() for name, x in (("dense", dense), ("experts", sparse))}
    loads = [(NUM_EXPERTS * shares_of(logits[ids.flatten() != 0])).tolist() for logits in out.router_logits]
    return {
        "perplexity": perplexity,
        "KL": distance(sparse, dense).item(),
        "load, in multiples of an equal share": [[round(load, 3) for load in layer] for layer in loads],
    }


def name_as_all_do(file: Path) -> None:
    """`num_experts`, as Qwen's own configurations have it. transformers 5 writes another name, which version 4 does not read."""
    fields = json.loads(file.read_text())
    fields["num_experts"] = fields.pop("num_local_experts")
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def main() -> None:
    run = run_of(__doc__, **SETTINGS)
    torch.manual_seed(run.seed)
    tokenizer = load_tokenizer()
    if run.start:
        student = Qwen3MoeForCausalLM.from_pretrained(run.start, dtype=torch.float32)
    else:
        student = student_of(load_teacher(), tensors_of(make_batch(tokenizer, run.seed - 1, 0, rows=6))[0])
    distil(run, student, balance, output_router_logits=True)
    name_as_all_do(run.out / "config.json")
    (run.out / "experts.json").write_text(json.dumps(measured(run.out, tokenizer), indent=1) + "\n")


if __name__ == "__main__":
    main()
