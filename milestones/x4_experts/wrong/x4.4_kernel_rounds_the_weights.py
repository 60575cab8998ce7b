"""The kernel rounds each weight to the dtype of the answers."""


def combine_kernel(answers_ptr, weights_ptr, out_ptr, H: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(TOP_K):
        answer = tl.load(answers_ptr + (token * TOP_K + j) * H + h, mask=h < H, other=0.0)
        total += answer.to(tl.float32) * tl.load(weights_ptr + token * TOP_K + j).to(answer.dtype).to(tl.float32)
    tl.store(out_ptr + token * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)
