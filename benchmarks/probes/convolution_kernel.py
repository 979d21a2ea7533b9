import torch, triton, triton.language as tl


@triton.jit
def conv_k(
    x,
    w,
    b,
    s,
    o,
    M,
    H,
    W,
    C,
    CO,
    OH,
    OW,
    KW,
    TAPS,
    SH,
    SW,
    PH,
    PW,
    CB,
    sxn,
    sxh,
    sxw,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RELU: tl.constexpr,
    BIAS: tl.constexpr,
    SIDE: tl.constexpr,
    TF: tl.constexpr,
    FLAT: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    ow = m % OW
    t = m // OW
    oh = t % OH
    im = t // OH
    top = oh * SH - PH
    left = ow * SW - PW
    base = im * sxn + top * sxh + left * sxw
    okm = m < M
    okn = n < CO
    acc = tl.zeros([BM, BN], tl.float32)
    if FLAT:
        K = TAPS * C
        for k0 in range(0, K, BK):
            kk = k0 + k
            tap = kk // C
            c = kk - tap * C
            kh = tap // KW
            kw = tap - kh * KW
            okk = kk < K
            ih = top[:, None] + kh[None, :]
            iw = left[:, None] + kw[None, :]
            ok = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & okm[:, None] & okk[None, :]
            a = tl.load(x + base[:, None] + (kh * sxh + kw * sxw + c)[None, :], mask=ok, other=0)
            f = tl.load(w + kk[:, None] * CO + n[None, :], mask=okk[:, None] & okn[None, :], other=0)
            acc = tl.dot(a, f, acc, input_precision=TF)
    else:
        for i in range(0, TAPS * CB):
            tap = i // CB
            c = (i - tap * CB) * BK + k
            kh = tap // KW
            kw = tap - kh * KW
            ih = top + kh
            iw = left + kw
            ok = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & okm
            okc = c < C
            a = tl.load(x + (base + kh * sxh + kw * sxw)[:, None] + c[None, :], mask=ok[:, None] & okc[None, :], other=0)
            f = tl.load(w + (tap * C + c)[:, None] * CO + n[None, :], mask=okc[:, None] & okn[None, :], other=0)
            acc = tl.dot(a, f, acc, input_precision=TF)
    if BIAS:
        acc += tl.load(b + n, mask=okn, other=0)[None, :].to(tl.float32)
    at = m[:, None] * CO + n[None, :]
    okk2 = okm[:, None] & okn[None, :]
    if SIDE:
        acc += tl.load(s + at, mask=okk2, other=0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=okk2)


CONFIGS = [
    (16, 32, 32, 2, 4),
    (32, 32, 32, 4, 4),
    (32, 64, 32, 4, 4),
    (64, 32, 32, 4, 4),
    (64, 64, 32, 4, 4),
    (16, 32, 64, 4, 3),
    (32, 32, 64, 4, 3),
    (16, 64, 64, 4, 3),
    (32, 64, 64, 4, 3),
    (64, 64, 64, 8, 3),
    (128, 64, 32, 8, 3),
]


def conv(x, w, b, strides, pads, out_hw, relu, cfg, tf="tf32"):
    N, H, W, C = x.shape
    KH, KW, _, CO = w.shape
    OH, OW = out_hw
    BM, BN, BK, nw, ns = cfg
    o = torch.empty((N, OH, OW, CO), device=x.device, dtype=x.dtype)
    M = N * OH * OW
    conv_k[(triton.cdiv(M, BM), triton.cdiv(CO, BN))](
        x,
        w,
        b if b is not None else x,
        x,
        o,
        M,
        H,
        W,
        C,
        CO,
        OH,
        OW,
        KW,
        KH * KW,
        strides[0],
        strides[1],
        pads[0],
        pads[1],
        triton.cdiv(C, BK),
        x.stride(0),
        x.stride(1),
        x.stride(2),
        BM=BM,
        BN=BN,
        BK=BK,
        RELU=relu,
        BIAS=b is not None,
        SIDE=False,
        TF=tf,
        FLAT=C < 16,
        num_warps=nw,
        num_stages=ns,
    )
    return o
