// What a decode does on a CPU, for numbers of type NUMBER: `library.py` compiles it, `ops.py` calls it.
//
// There is little to compute in a decode, only weights and K/V to read. So 16 numbers at a time are read as they are, and
// become float32 in a register; all sums are float32. A token's result never depends on how many others come with it.
//
// No library and no header of torch: it compiles in a second. OpenMP is the one that torch has loaded, so both share their
// threads. A tensor is contiguous where no stride is given; a pointer may be null where it says so.

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
using Ints = uint32_t __attribute__((vector_size(4 * LANES)));
using Shorts = uint16_t __attribute__((vector_size(2 * LANES)));

template <class To, class From> To copy_bits(const From *from) {
    To to;
    memcpy(&to, from, sizeof to);
    return to;
}

// Each kind of number: as float32, 16 of them as float32, and back, rounded to the nearest, of two as near to the even one.
inline float wide(float x) { return x; }
inline Floats load(const float *p) { return copy_bits<Floats>(p); }
template <class T> T narrow(float x) { return T(x); }

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
template <> BFloat16 narrow(float x) {
    uint32_t bits = copy_bits<uint32_t>(&x);
    return {uint16_t(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#ifdef __FLT16_MAX__  // a compiler that knows them
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

using Number = NUMBER;  // what the model computes with
inline float rounded(float x) { return wide(narrow<Number>(x)); }

#ifdef __AVX512F__
constexpr int TILE = 4;  // rows of weights, and of x, that meet in registers
#else
constexpr int TILE = 2;
#endif

inline float total(Floats v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

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

// x [rows, inputs] times the transpose of weight [outputs, inputs], plus bias and residual, which may be null: [rows, outputs].
extern "C" void linear(const Number *x, const Number *weight, const Number *bias, const Number *residual, Number *out,
                       Index rows, Index stride_x, Index inputs, Index outputs, int threads) {
    float *wide_x = (float *)malloc(rows * inputs * sizeof(float));
    for (Index m = 0; m < rows; m++)
        for (Index k = 0; k < inputs; k++) wide_x[m * inputs + k] = wide(x[m * stride_x + k]);
#pragma omp parallel for num_threads(threads)
    for (Index n = 0; n < outputs; n += TILE) {
        int count = outputs - n < TILE ? outputs - n : TILE;
        float sums[TILE][TILE];
        for (Index m = 0, many; m < rows; m += many) {
            many = rows - m < TILE ? 1 : TILE;
            (many == 1 ? tile<1> : tile<TILE>)(count, weight + n * inputs, wide_x + m * inputs, inputs, sums);
            for (int j = 0; j < many; j++)
                for (int i = 0; i < count; i++) {
                    Index at = (m + j) * outputs + n + i;
                    float y = sums[i][j] + (bias ? wide(bias[n + i]) : 0);
                    out[at] = narrow<Number>(residual ? y + wide(residual[at]) : y);
                }
        }
    }
    free(wide_x);
}

// out = x / rms(x) * weight, rounded before it is multiplied; all three [size].
static void norm_row(const Number *x, const Number *weight, Number *out, Index size, float eps) {
    Floats lanes = {};
    Index k = 0;
    for (; k + LANES <= size; k += LANES) {
        Floats v = load(x + k);
        lanes += v * v;
    }
    float squares = total(lanes);
    for (; k < size; k++) squares += wide(x[k]) * wide(x[k]);
    float inverse = 1 / sqrtf(squares / size + eps);
    for (k = 0; k < size; k++) out[k] = narrow<Number>(rounded(wide(x[k]) * inverse) * wide(weight[k]));
}

// Each row of x [rows, size] normed. With a residual, not null, sum = x + residual is normed instead; both are [rows, size].
extern "C" void rms_norm(const Number *x, const Number *residual, const Number *weight, Number *sum, Number *out, Index rows,
                         Index size, float eps, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Index m = 0; m < rows; m++) {
        const Number *row = x + m * size;
        if (residual) {
            for (Index k = m * size; k < (m + 1) * size; k++) sum[k] = narrow<Number>(wide(x[k]) + wide(residual[k]));
            row = sum + m * size;
        }
        norm_row(row, weight, out + m * size, size, eps);
    }
}

// A KV cache [2, N, B, Hkv, D] and how far its parts are apart, in numbers; the D numbers of a token and head lie together.
struct Cache {
    Number *data;
    Index values, block, token, head;  // strides
    Index block_size;                  // B
    Number *at(Index slot) const { return data + slot / block_size * block + slot % block_size * token; }
};

// Turn the pairs (i, i + size / 2) of x [size] by the angles of a row of the table: first cosines, then sines.
static void rotate(const Number *x, const float *angles, Number *out, Index size) {
    Index half = size / 2;
    for (Index i = 0; i < half; i++) {
        float a = wide(x[i]), b = wide(x[i + half]), cosine = angles[i], sine = angles[i + half];
        out[i] = narrow<Number>(a * cosine - b * sine);
        out[i + half] = narrow<Number>(b * cosine + a * sine);
    }
}

// From a projection qkv [T, (Hq + 2 Hkv) D] to rotated queries [T, Hq, D], and keys and values in the cache; slot -1 is nowhere.
// Weights [D] of norms of query and key heads may be null.
extern "C" void prepare(const Number *qkv, const Number *query_norm, const Number *key_norm, const float *cos_sin,
                        const Index *positions, const Index *slots, Number *query, const Cache *cache, Index tokens,
                        Index query_heads, Index kv_heads, Index size, float eps, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Index t = 0; t < tokens; t++) {
        const Number *from = qkv + t * (query_heads + 2 * kv_heads) * size;
        const float *angles = cos_sin + positions[t] * size;
        for (Index h = 0; h < query_heads + 2 * kv_heads; h++, from += size) {
            Index kv_head = h - query_heads;
            if (kv_head >= 0 && slots[t] < 0) break;
            if (kv_head >= kv_heads) {
                memcpy(cache->at(slots[t]) + cache->values + (kv_head - kv_heads) * cache->head, from, size * sizeof(Number));
                continue;
            }
            Number *to = kv_head < 0 ? query + (t * query_heads + h) * size : cache->at(slots[t]) + kv_head * cache->head;
            const Number *norm = kv_head < 0 ? query_norm : key_norm;
            if (norm) norm_row(from, norm, to, size, eps);
            rotate(norm ? to : from, angles, to, size);
        }
    }
}

// Attention of one query [D], in float32, over the `length` tokens whose blocks a table lists; a score for each fits in `scores`.
static void attend_head(const float *query, const Cache &cache, Index head, const int32_t *table, Index length, float scale,
                        float *scores, float *out, Index size) {
    auto each_token = [&](auto visit) {
        for (Index first = 0; first < length; first += cache.block_size) {
            const Number *key = cache.data + table[first / cache.block_size] * cache.block + head * cache.head;
            Index end = length - first < cache.block_size ? length : first + cache.block_size;
            for (Index j = first; j < end; j++, key += cache.token) visit(j, key);
        }
    };
    float most = -INFINITY, sum = 0;
    each_token([&](Index j, const Number *key) {
        dots<1, 1>(key, query, size, (float(*)[TILE])(scores + j));
        scores[j] *= scale;
        most = scores[j] > most ? scores[j] : most;
    });
    for (Index j = 0; j < length; j++) sum += scores[j] = expf(scores[j] - most);
    for (Index k = 0; k < size; k++) out[k] = 0;
    each_token([&](Index j, const Number *key) {
        const Number *value = key + cache.values;
        float weight = scores[j] / sum;
        Index k = 0;
        for (; k + LANES <= size; k += LANES) {
            Floats v = load(out + k) + weight * load(value + k);
            memcpy(out + k, &v, sizeof v);
        }
        for (; k < size; k++) out[k] += weight * wide(value[k]);
    });
}

// One new token of each sequence, query [S, Hq, D], over the cache: out [S, Hq, D]. A sequence of length 0 gets zeros.
extern "C" void decode(const Number *query, const Cache *cache, const int32_t *tables, const int32_t *lengths, Number *out,
                       Index sequences, Index stride_table, Index query_heads, Index kv_heads, Index size, float scale,
                       int threads) {
#pragma omp parallel for num_threads(threads)
    for (Index i = 0; i < sequences * query_heads; i++) {
        Index s = i / query_heads, head = i % query_heads * kv_heads / query_heads;
        float *space = (float *)malloc((lengths[s] + 2 * size) * sizeof(float));
        float *wide_query = space, *result = space + size, *scores = space + 2 * size;
        for (Index k = 0; k < size; k++) wide_query[k] = wide(query[i * size + k]);
        attend_head(wide_query, *cache, head, tables + s * stride_table, lengths[s], scale, scores, result, size);
        for (Index k = 0; k < size; k++) out[i * size + k] = narrow<Number>(result[k]);
        free(space);
    }
}
