/* The two passes of the loss over the logits on one CPU core; loss_reference.py defines them.
 *
 * The file is compiled once for each type of logits: with BFLOAT16 defined, or without it for float32. The statistics
 * read each logit from memory once: they find the largest logit of a chunk that fits the first-level cache, and then
 * exponentiate the chunk relative to the largest logit so far. The gradient reads and writes each logit once. Compilers
 * turn the inner loops over LANES into vector instructions. No sum is reordered, since each lane has its own. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"

#define LANES 64
#define CHUNK 1024

#ifdef BFLOAT16
typedef uint16_t element;

static inline float load(element x) { return as_float((uint32_t)x << 16); }

/* Round to nearest, ties to even. A NaN from arithmetic has zeros in its low bits, so it stays a NaN. */
static inline element store(float x) {
    uint32_t bits = as_bits(x);
    return (element)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#else
typedef float element;

static inline float load(element x) { return x; }
static inline element store(float x) { return x; }
#endif

static inline float larger(float a, float b) { return a > b ? a : b; }

static float largest_of(const element *x, int64_t count, float inverse_temperature) {
    float lane[LANES], largest = -INFINITY;
    int64_t j = 0;
    for (int k = 0; k < LANES; k++) lane[k] = -INFINITY;
    for (; j + LANES <= count; j += LANES)
        for (int k = 0; k < LANES; k++) lane[k] = larger(load(x[j + k]), lane[k]);
    for (; j < count; j++) largest = larger(load(x[j]), largest);
    for (int k = 0; k < LANES; k++) largest = larger(lane[k], largest);
    return largest * inverse_temperature;
}

static double sum_of_exponentials(const element *x, int64_t count, float inverse_temperature, float base) {
    float lane[LANES] = {0.0f};
    double sum = 0.0;
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES)
        for (int k = 0; k < LANES; k++) lane[k] += exponential(load(x[j + k]) * inverse_temperature - base);
    for (; j < count; j++) sum += exponential(load(x[j]) * inverse_temperature - base);
    for (int k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

static double sum_of_differences(const element *x, int64_t count, float inverse_temperature, float base) {
    float lane[LANES] = {0.0f};
    double sum = 0.0;
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES)
        for (int k = 0; k < LANES; k++) lane[k] += load(x[j + k]) * inverse_temperature - base;
    for (; j < count; j++) sum += load(x[j]) * inverse_temperature - base;
    for (int k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

/* out = weight * exp(y - base) - every; `out` may be `x`, since a run of LANES is read before it is written. */
static void write_exponentials(const element *x, element *out, int64_t count, float inverse_temperature, float base,
                               float weight, float every) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        float block[LANES];
        for (int k = 0; k < LANES; k++)
            block[k] = exponential(load(x[j + k]) * inverse_temperature - base) * weight - every;
        for (int k = 0; k < LANES; k++) out[j + k] = store(block[k]);
    }
    for (; j < count; j++) out[j] = store(exponential(load(x[j]) * inverse_temperature - base) * weight - every);
}

/* With `exponentiate`, logits become exp(y - m) / temperature, and 0 for the target. */
void row_statistics(element *logits, int64_t stride, int64_t rows, int64_t columns, const int64_t *target_local,
                    float inverse_temperature, int want_sum, int exponentiate, float *statistics) {
    for (int64_t row = 0; row < rows; row++) {
        element *x = logits + row * stride;
        float maximum = -INFINITY;
        /* All logits so far may be -inf. Their exponentials are then 0 for any finite base. */
        float base = -FLT_MAX;
        double sum_exp = 0.0, sum = 0.0;
        for (int64_t start = 0; start < columns; start += CHUNK) {
            int64_t count = columns - start < CHUNK ? columns - start : CHUNK;
            float largest = largest_of(x + start, count, inverse_temperature);
            if (largest > maximum) {
                if (maximum > -INFINITY) {
                    double below = (double)base - larger(largest, -FLT_MAX);
                    sum_exp *= exp(below);
                    sum += below * (double)start;
                }
                maximum = largest;
                base = larger(maximum, -FLT_MAX);
            }
            sum_exp += sum_of_exponentials(x + start, count, inverse_temperature, base);
            if (want_sum) sum += sum_of_differences(x + start, count, inverse_temperature, base);
        }
        int64_t target = target_local[row];
        float *out = statistics + row * (want_sum ? 4 : 3);
        out[0] = maximum;
        out[1] = (float)sum_exp;
        out[2] = target < 0 ? -INFINITY : load(x[target]) * inverse_temperature - base;
        if (want_sum) out[3] = (float)sum;
        if (exponentiate) {
            write_exponentials(x, x, columns, inverse_temperature, base, inverse_temperature, 0.0f);
            if (target >= 0) x[target] = store(0.0f);
        }
    }
}

void gradient(const element *logits, int64_t stride, element *out, int64_t out_stride, int64_t rows, int64_t columns,
              const int64_t *target_local, const float *shift, const float *scale, const float *at_target,
              const float *rest, float inverse_temperature) {
    for (int64_t row = 0; row < rows; row++) {
        element *to = out + row * out_stride;
        int64_t target = target_local[row];
        float every = rest ? rest[row] : 0.0f;
        float on_target = target < 0 ? 0.0f : at_target[row];
        if (scale[row] == 0.0f && every == 0.0f && on_target == 0.0f) {
            memset(to, 0, (size_t)columns * sizeof(element));
            continue;
        }
        write_exponentials(logits + row * stride, to, columns, inverse_temperature, larger(shift[row], -FLT_MAX),
                           scale[row] * inverse_temperature, every * inverse_temperature);
        if (target >= 0) to[target] = store(on_target * inverse_temperature);
    }
}
