// Logarithm and exponential of sixteen values at a time, with the same bits for all registers:
// polynomials of the Cephes library, without fused multiply-add (see CMakeLists.txt).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

// Compiled for wider registers too, and chosen when it is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define SGLANG_HVD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SGLANG_HVD_CLONES
#endif

namespace sglang_hvd {

constexpr int kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using IntLanes = std::int32_t __attribute__((vector_size(kLanes * sizeof(std::int32_t))));

// Values in the normal range of float, > 0. Relative error below 2e-7.
[[gnu::always_inline]] inline Lanes log_of(Lanes x) {
    const auto bits = std::bit_cast<IntLanes>(x);
    Lanes exponent = __builtin_convertvector((bits >> 23) - 126, Lanes);
    Lanes m = std::bit_cast<Lanes>((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
    const IntLanes is_low = m < 0.707106781186547524f;
    exponent = is_low ? exponent - 1.f : exponent;
    m = is_low ? m + m - 1.f : m - 1.f;
    const Lanes z = m * m;
    Lanes y = 7.0376836292e-2f * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z;
    y = y - 2.12194440e-4f * exponent - 0.5f * z;
    return m + y + 0.693359375f * exponent;
}

[[gnu::always_inline]] inline Lanes clamp_of(Lanes x, float low, float high) {
    x = x < low ? Lanes{} + low : x;
    return x > high ? Lanes{} + high : x;
}

// Clamped to [exp(-80), exp(80)]. Relative error below 2e-7.
[[gnu::always_inline]] inline Lanes exp_of(Lanes x) {
    x = clamp_of(x, -80.f, 80.f);
    const Lanes scaled = x * 1.44269504088896341f;
    const auto n = __builtin_convertvector(scaled + (scaled >= 0.f ? Lanes{} + 0.5f : Lanes{} - 0.5f), IntLanes);
    const Lanes power = __builtin_convertvector(n, Lanes);
    x = x - power * 0.693359375f + power * 2.12194440e-4f;
    Lanes y = 1.9875691500e-4f * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.f;
    return y * std::bit_cast<Lanes>((n + 127) << 23);
}

[[gnu::always_inline]] inline Lanes sigmoid_of(Lanes x) { return 1.f / (1.f + exp_of(-x)); }

// Log odds of probabilities, taken to lie in [1e-5, 1 - 1e-5].
[[gnu::always_inline]] inline Lanes logit_of(Lanes prob) {
    const Lanes p = clamp_of(prob, 1e-5f, 1.f - 1e-5f);
    return log_of(p / (1.f - p));
}

[[gnu::always_inline]] inline Lanes load(const float* values) {
    Lanes lanes;
    std::memcpy(&lanes, values, sizeof(lanes));
    return lanes;
}
[[gnu::always_inline]] inline void store(const Lanes& lanes, float* values) {
    std::memcpy(values, &lanes, sizeof(lanes));
}

}  // namespace sglang_hvd
