// A decode step's layers on a CPU, for numbers of type NUMBER: `library.py` compiles this, `ops.py` calls it.
//
// There is little to compute in a decode, only weights and K/V to read. So 16 numbers at a time are read as they are, and
// become float32 in registers; all sums are float32. A token's result never depends on how many others come with it.
//
// No library and no header of torch: it compiles in a second. OpenMP is the one that torch has loaded, so both share their
// threads. All tensors are contiguous, but the KV cache; a pointer may be null where it says so.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

using Index = int64_t;
constexpr Index LANES = 16;
using Floats = float __attribute__((vector_size(4 * LANES)));  // one register of AVX-512, two of AVX2, four of NEON
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Shorts = uint16_t __attribute__((vector_size(2 * LANES)));

template <class To, class From> To copy_bits(const From *from) {
    To to;
    memcpy(&to, from, sizeof to);
    return to;
}

// --- Numbers: each kind as float32, 16 of them as float32, and back, rounded to the nearest, of two as near to the even one ---

inline float wide(float x) { return x; }
inline Floats load(const float *p) { return copy_bits<Floats>(p); }
template <class T> inline T narrow(float x) { return T(x); }

struct BFloat16 { uint16_t bits; };  // the upper half of a float32
inline float wide(BFloat16 x) {
    uint32_t bits = x.bits << 16;
    return copy_bits<float>(&bits);
}
inline Floats load(const BFloat16 *p) {
#ifdef __AVX512F__
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(copy_bits<__m256i>(p)), 16);
#else
    return (Floats)(__builtin_convertvector(copy_bits<Shorts>(p), Ints) << 16);
#endif
}
template <> inline BFloat16 narrow(float x) {
    uint32_t bits = copy_bits<uint32_t>(&x);
    return {uint16_t(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#if defined(__FLT16_MAX__) && (defined(__x86_64__) || defined(__clang__) || __GNUC__ >= 13)  // a compiler that knows them
using Float16 = _Float16;
inline float wide(Float16 x) { return x; }
inline Floats load(const Float16 *p) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtph_ps(copy_bits<__m256i>(p));
#elif defined(__F16C__)
    __m256 halves[] = {_mm256_cvtph_ps(copy_bits<__m128i>(p)), _mm256_cvtph_ps(copy_bits<__m128i>(p + LANES / 2))};
    return copy_bits<Floats>(halves);
#else
    return __builtin_convertvector(copy_bits<Float16 __attribute__((vector_size(2 * LANES)))>(p), Floats);
#endif
}
#endif

using Number = NUMBER;
inline float rounded(float x) { return wide(narrow<Number>(x)); }

inline float total(Floats v) {  // number by number: where a part is copied, g++ keeps the whole in memory all along
    auto four = [&](int i) { return (v[i] + v[i + 8]) + (v[i + 4] + v[i + 12]); };
    return (four(0) + four(2)) + (four(1) + four(3));
}

// e^x (Cephes' expf); where it would be too small for a float32, or too large, the smallest or the largest of them.
inline Floats exponential(Floats x) {
    const Floats least = Floats{} - 87.3f, most = Floats{} + 88.3f, half = Floats{} + 0.5f;
    x = x < least ? least : x > most ? most : x;
    Ints power = __builtin_convertvector(x * 1.44269504f + (x < 0 ? -half : half), Ints);
    Floats n = __builtin_convertvector(power, Floats), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = (r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f;
    p = (((p * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 0.5f) * r * r + r + 1;
    return p * (Floats)((power + 127) << 23);
}

// --- Products ---------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__
constexpr int TILE = 4;  // rows of weights, and of x, that meet in registers
#else
constexpr int TILE = 2;
#endif

// sums[n][m] = the product of row n of weights and row m of x; rows have `size` numbers. Each sum has one order, whatever N and M.
template <int N, int M> void dots(const Number *weights, const float *x, Index size, float (*sums)[TILE]) {
    Floats lanes[N][M] = {};
    Index k = 0;
    for (; k + LANES <= size; k += LANES) {
        Floats xs[M];
        for (int m = 0; m < M; m++) xs[m] = load(x + m * size + k);
        for (int n = 0; n < N; n++) {
            __builtin_prefetch(weights + (N + n) * size + k);
            Floats weight = load(weights + n * size + k);
            for (int m = 0; m < M; m++) lanes[n][m] += weight * xs[m];
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++) {
            sums[n][m] = total(lanes[n][m]);
            for (Index j = k; j < size; j++) sums[n][m] += wide(weights[n * size + j]) * x[m * size + j];
        }
}

// The same for `count` rows of weights, up to TILE. For one row of x they have nothing to share: then they are read one by one.
template <int M> void tile(int count, const Number *weights, const float *x, Index size, float (*sums)[TILE]) {
    if (M > 1 && count == TILE) return dots<TILE, M>(weights, x, size, sums);
    for (int n = 0; n < count; n++) dots<1, M>(weights + n * size, x, size, sums + n);
}

struct Linear {
    const Number *weight, *bias;  // [outputs, inputs], [outputs] or null
    Index outputs, inputs;
};

constexpr Index ALONE = 1 << 15;  // numbers that one thread has read before a second one has woken up
static int threads_for(Index numbers, int threads) { return numbers < ALONE ? 1 : threads; }

// x [rows, inputs] -> out [rows, outputs].
extern "C" void multiply(const Linear *linear, const Number *x, Number *out, Index rows, int threads) {
    const Number *weight = linear->weight, *bias = linear->bias;
    Index outputs = linear->outputs, inputs = linear->inputs;
    float *wide_x = (float *)malloc(rows * inputs * sizeof(float));
    for (Index i = 0; i < rows * inputs; i++) wide_x[i] = wide(x[i]);
#pragma omp parallel for num_threads(threads_for(outputs * inputs, threads))
    for (Index n = 0; n < outputs; n += TILE) {
        int count = outputs - n < TILE ? outputs - n : TILE;
        float sums[TILE][TILE];
        for (Index m = 0, many; m < rows; m += many) {
            many = rows - m < TILE ? 1 : TILE;
            (many == 1 ? tile<1> : tile<TILE>)(count, weight + n * inputs, wide_x + m * inputs, inputs, sums);
            for (int j = 0; j < many; j++)
                for (int i = 0; i < count; i++)
                    out[(m + j) * outputs + n + i] = narrow<Number>(sums[i][j] + (bias ? wide(bias[n + i]) : 0));
        }
    }
    free(wide_x);
}

// --- Between the products: what the layers in torch do, with their roundings -------------------------------------------

// out = x / rms(x) * weight, all three [size].
static void norm(const Number *x, const Number *weight, Number *out, Index size, float eps) {
    Floats lanes = {};
    Index k = 0;
    for (; k + LANES <= size; k += LANES) lanes += load(x + k) * load(x + k);
    float squares = total(lanes);
    for (; k < size; k++) squares += wide(x[k]) * wide(x[k]);
    float inverse = 1 / sqrtf(squares / size + eps);
    for (k = 0; k < size; k++) out[k] = narrow<Number>(rounded(wide(x[k]) * inverse) * wide(weight[k]));
}

// residual += x, out = the norm of that; all [rows, size].
static void add_norm(const Number *x, Number *residual, const Number *weight, Number *out, Index rows, Index size, float eps) {
    for (Index k = 0; k < rows * size; k++) residual[k] = narrow<Number>(wide(x[k]) + wide(residual[k]));
    for (Index m = 0; m < rows; m++) norm(residual + m * size, weight, out + m * size, size, eps);
}

// silu(first half) * second half: [rows, 2 size] -> [rows, size].
static void silu_and_mul(const Number *gate_up, Number *out, Index rows, Index size) {
    for (Index m = 0; m < rows; m++, gate_up += 2 * size, out += size)
        for (Index k = 0; k < size; k += LANES) {
            float gates[LANES] = {};
            Index count = size - k < LANES ? size - k : LANES;
            for (Index i = 0; i < count; i++) gates[i] = wide(gate_up[k + i]);
            Floats silu = load(gates) / (1 + exponential(-load(gates)));
            for (Index i = 0; i < count; i++) out[k + i] = narrow<Number>(rounded(silu[i]) * wide(gate_up[size + k + i]));
        }
}

// Turn the pairs (i, i + size / 2) of x [size] by a row of the table: first cosines, then sines. `out` may be `x`.
static void rotate(const Number *x, const float *angles, Number *out, Index size) {
    Index half = size / 2;
    for (Index i = 0; i < half; i++) {
        float a = wide(x[i]), b = wide(x[i + half]), cosine = angles[i], sine = angles[i + half];
        out[i] = narrow<Number>(a * cosine - b * sine);
        out[i + half] = narrow<Number>(b * cosine + a * sine);
    }
}

// --- Attention --------------------------------------------------------------------------------------------------------

struct Heads {
    Index query, kv, size;                    // Hq, Hkv, D
    float scale, eps;
    const Number *query_norm, *key_norm;      // [D], null where heads are not normed
    const float *cos_sin;                     // [positions, D]
};

struct Cache {  // [2, N, B, Hkv, D], any strides but the last
    Number *data;
    Index values, block, token, head;  // strides, in numbers
    Index block_size;                  // B
};

struct Batch {  // one new token of each of S sequences
    Index sequences, stride_table;
    const Index *positions, *slots;         // [S]; slot -1 is nowhere
    const int32_t *tables, *lengths;        // [S, stride_table], [S]; a sequence of length 0 is padding
};

// Norm and rotate the heads of a token, qkv [(Hq + 2 Hkv) D]: queries to `query` [Hq, D], keys and values to the cache.
static void prepare(const Number *qkv, const Heads &heads, Index position, Index slot, Number *query, const Cache &cache) {
    const float *angles = heads.cos_sin + position * heads.size;
    auto turn = [&](const Number *weight, Number *to) {
        if (weight) norm(qkv, weight, to, heads.size, heads.eps);
        rotate(weight ? to : qkv, angles, to, heads.size);
        qkv += heads.size;
    };
    for (Index h = 0; h < heads.query; h++) turn(heads.query_norm, query + h * heads.size);
    if (slot < 0) return;
    Number *to = cache.data + slot / cache.block_size * cache.block + slot % cache.block_size * cache.token;
    for (Index h = 0; h < heads.kv; h++) turn(heads.key_norm, to + h * cache.head);
    for (Index h = 0; h < heads.kv; h++, qkv += heads.size)
        memcpy(to + cache.values + h * cache.head, qkv, heads.size * sizeof(Number));
}

// Attention of one query over the `length` tokens whose blocks `table` lists: softmax(scale * K q) V, [D].
static void attend(const Number *query, const Cache &cache, Index head, const int32_t *table, Index length, float scale,
                   Number *out, Index size) {
    Index room = (length + LANES - 1) / LANES * LANES;
    float *scores = (float *)malloc((room + 2 * size) * sizeof(float)), *wide_query = scores + room, *sum = wide_query + size;
    for (Index k = 0; k < size; k++) wide_query[k] = wide(query[k]), sum[k] = 0;
    auto each_token = [&](auto visit) {
        for (Index first = 0; first < length; first += cache.block_size) {
            const Number *key = cache.data + table[first / cache.block_size] * cache.block + head * cache.head;
            Index end = length - first < cache.block_size ? length : first + cache.block_size;
            for (Index j = first; j < end; j++, key += cache.token) visit(j, key);
        }
    };
    float most = -INFINITY;
    each_token([&](Index j, const Number *key) {
        float product[1][TILE];
        dots<1, 1>(key, wide_query, size, product);
        scores[j] = scale * product[0][0];
        most = scores[j] > most ? scores[j] : most;
    });
    for (Index j = length; j < room; j++) scores[j] = -INFINITY;
    Floats weights = {};
    for (Index j = 0; j < room; j += LANES) {
        Floats weight = exponential(load(scores + j) - most);
        memcpy(scores + j, &weight, sizeof weight);
        weights += weight;
    }
    float inverse = 1 / total(weights);
    each_token([&](Index j, const Number *key) {
        const Number *value = key + cache.values;
        Index k = 0;
        for (; k + LANES <= size; k += LANES) {
            Floats v = load(sum + k) + scores[j] * load(value + k);
            memcpy(sum + k, &v, sizeof v);
        }
        for (; k < size; k++) sum[k] += scores[j] * wide(value[k]);
    });
    for (Index k = 0; k < size; k++) out[k] = narrow<Number>(length ? sum[k] * inverse : 0);
    free(scores);
}

// All between two projections: qkv [S, (Hq + 2 Hkv) D] -> out [S, Hq, D], and the new K and V in the cache; `query` as out.
extern "C" void attention(const Heads *heads, const Cache *cache, const Batch *batch, const Number *qkv, Number *query,
                          Number *out, int threads) {
    Index width = (heads->query + 2 * heads->kv) * heads->size, read = 0;
    for (Index s = 0; s < batch->sequences; s++) {
        prepare(qkv + s * width, *heads, batch->positions[s], batch->slots[s], query + s * heads->query * heads->size, *cache);
        read += batch->lengths[s] * heads->query * heads->size;
    }
#pragma omp parallel for num_threads(threads_for(read, threads))
    for (Index i = 0; i < batch->sequences * heads->query; i++) {
        Index s = i / heads->query, head = i % heads->query * heads->kv / heads->query;
        attend(query + i * heads->size, *cache, head, batch->tables + s * batch->stride_table, batch->lengths[s], heads->scale,
               out + i * heads->size, heads->size);
    }
}

// --- A decoder layer --------------------------------------------------------------------------------------------------

struct Layer {
    Linear qkv, back, gate_up, down;
    Heads heads;
    const Number *input_norm, *post_norm;  // [H]
    float input_eps, post_eps;
};

// Computes a decoder layer. x and residual [S, H] are the outputs of the layer before,
// and are overwritten with the outputs of this one.
extern "C" void decoder_layer(const Layer *layer, const Cache *cache, const Batch *batch, Number *x, Number *residual,
                              int threads) {
    Index rows = batch->sequences, hidden = layer->down.outputs, inner = layer->down.inputs;
    Number *normed = (Number *)malloc(rows * (hidden + layer->qkv.outputs + 2 * layer->back.inputs + 3 * inner) * sizeof(Number));
    Number *qkv = normed + rows * hidden, *query = qkv + rows * layer->qkv.outputs, *attended = query + rows * layer->back.inputs;
    Number *gate_up = attended + rows * layer->back.inputs, *gated = gate_up + 2 * rows * inner;
    add_norm(x, residual, layer->input_norm, normed, rows, hidden, layer->input_eps);
    multiply(&layer->qkv, normed, qkv, rows, threads);
    attention(&layer->heads, cache, batch, qkv, query, attended, threads);
    multiply(&layer->back, attended, x, rows, threads);
    add_norm(x, residual, layer->post_norm, normed, rows, hidden, layer->post_eps);
    multiply(&layer->gate_up, normed, gate_up, rows, threads);
    silu_and_mul(gate_up, gated, rows, inner);
    multiply(&layer->down, gated, x, rows, threads);
    free(normed);
}
