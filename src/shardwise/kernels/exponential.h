/* An exponential function that a compiler turns into vector instructions. */

#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* exp(x) for x <= 0, to a few units in the last place; 0 where it is below the normal numbers; NaN stays NaN.
 *
 * exp(x) = 2^n 2^f, where n is the integer nearest to x / log 2. Adding a number so large that float32 has no bits for
 * a fraction rounds to n, and leaves n in the lowest bits. For |f| <= 1/2 the polynomial is within 2e-7 of
 * 2^f. */
static inline float exponential(float x) {
    const float large = 12582912.0f; /* 1.5 * 2^23 */
    const float log2_e = 1.44269504f;
    float shifted = x * log2_e + large;
    float f = x * log2_e - (shifted - large);
    float p = 1.32646586e-3f;
    p = p * f + 9.67156608e-3f;
    p = p * f + 5.55073433e-2f;
    p = p * f + 2.40222409e-1f;
    p = p * f + 6.93147004e-1f;
    p = p * f + 1.0f;
    p *= as_float((as_bits(shifted) + 127u) << 23); /* 2^n */
    return x < -87.3f ? 0.0f : p;
}
