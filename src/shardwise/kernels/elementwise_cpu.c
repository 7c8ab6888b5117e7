/* Elementwise functions of a transformer layer on one CPU core, in float32. Each reads and writes its tensors once;
 * elementwise.py and norms.py define them. */

#include <math.h>
#include <stdint.h>

#include "exponential.h"

/* With one sum per lane the compiler can use vector instructions without reordering a sum. */
#define LANES 16

static inline float sigmoid(float x) {
    float e = exponential(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* Each row of `inner` has `width` gates, then `width` ups. */
void swiglu(const float *inner, float *out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict gate = inner + row * 2 * width, *restrict up = gate + width;
        float *restrict to = out + row * width;
        for (int64_t j = 0; j < width; j++) to[j] = gate[j] * sigmoid(gate[j]) * up[j];
    }
}

void swiglu_gradient(const float *inner, const float *grad_output, float *grad_inner, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict gate = inner + row * 2 * width, *restrict up = gate + width;
        const float *restrict grad = grad_output + row * width;
        float *restrict to_gate = grad_inner + row * 2 * width, *restrict to_up = to_gate + width;
        for (int64_t j = 0; j < width; j++) {
            float s = sigmoid(gate[j]), silu = gate[j] * s;
            to_up[j] = grad[j] * silu;
            to_gate[j] = grad[j] * up[j] * (s + silu * (1.0f - s));
        }
    }
}

/* Rotate pairs half a head apart by the angles of their row. `x` is [rows, columns, 2 half] with the given strides,
 * `out` is contiguous, `cos` and `sin` are [rows, half]. `sign` is -1 to rotate back. */
void rotate(const float *x, int64_t row_stride, int64_t column_stride, float *out, int64_t rows, int64_t columns,
            int64_t half, const float *cos, const float *sin, float sign) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict c = cos + row * half, *restrict s = sin + row * half;
        for (int64_t column = 0; column < columns; column++) {
            const float *restrict first = x + row * row_stride + column * column_stride, *restrict second = first + half;
            float *restrict to = out + (row * columns + column) * 2 * half;
            for (int64_t j = 0; j < half; j++) {
                to[j] = first[j] * c[j] - second[j] * (sign * s[j]);
                to[j + half] = second[j] * c[j] + first[j] * (sign * s[j]);
            }
        }
    }
}

/* scale[row] = rsqrt(mean(x^2) + eps), out = x scale weight. */
void rms_norm(const float *x, const float *weight, float *out, float *scale, int64_t rows, int64_t width, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict from = x + row * width, *restrict w = weight;
        float *restrict to = out + row * width;
        float lane[LANES] = {0.0f};
        double sum = 0.0;
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES)
            for (int k = 0; k < LANES; k++) lane[k] += from[j + k] * from[j + k];
        for (; j < width; j++) sum += from[j] * from[j];
        for (int k = 0; k < LANES; k++) sum += lane[k];
        float s = (float)(1.0 / sqrt(sum / (double)width + eps));
        scale[row] = s;
        for (j = 0; j < width; j++) to[j] = from[j] * s * w[j];
    }
}

/* `grad_x` and `grad_weight` may be null. The sums over these rows are added to `grad_weight`, in double. */
void rms_norm_gradient(const float *x, const float *grad, const float *weight, const float *scale, float *grad_x,
                       double *grad_weight, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict from = x + row * width, *restrict g = grad + row * width, *restrict w = weight;
        float s = scale[row];
        int64_t j = 0;
        if (grad_x) {
            float *restrict to = grad_x + row * width;
            float lane[LANES] = {0.0f};
            double sum = 0.0;
            for (; j + LANES <= width; j += LANES)
                for (int k = 0; k < LANES; k++) lane[k] += from[j + k] * g[j + k] * w[j + k];
            for (; j < width; j++) sum += from[j] * g[j] * w[j];
            for (int k = 0; k < LANES; k++) sum += lane[k];
            float factor = (float)(sum * s * s * s / (double)width);
            for (j = 0; j < width; j++) to[j] = g[j] * w[j] * s - from[j] * factor;
        }
        if (grad_weight) {
            double *restrict to = grad_weight;
            for (j = 0; j < width; j++) to[j] += (double)(g[j] * from[j] * s);
        }
    }
}

/* The sum of squares, in double, of each run of `length` elements; the last may be shorter. */
void sums_of_squares(const float *x, double *sums, int64_t size, int64_t length) {
    for (int64_t start = 0; start < size; start += length) {
        const float *restrict from = x + start;
        int64_t j = 0, n = size - start < length ? size - start : length;
        double lane[LANES] = {0.0}, sum = 0.0;
        for (; j + LANES <= n; j += LANES)
            for (int k = 0; k < LANES; k++) lane[k] += (double)from[j + k] * (double)from[j + k];
        for (; j < n; j++) sum += (double)from[j] * (double)from[j];
        for (int k = 0; k < LANES; k++) sum += lane[k];
        *sums++ = sum;
    }
}
