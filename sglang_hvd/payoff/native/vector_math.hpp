// Logarithm and exponential that the compiler can vectorise, and that give the same bits on every
// machine: polynomials of the Cephes library, without fused multiply-add (see CMakeLists.txt).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

// Compiled for wider registers too, and chosen when it is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define SGLANG_HVD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SGLANG_HVD_CLONES
#endif

namespace sglang_hvd {

// x in the normal range of float, > 0. Relative error below 2e-7.
inline float log_of(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    auto exponent = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 126);
    float m = std::bit_cast<float>((bits & 0x007FFFFFu) | 0x3F000000u);  // in [0.5, 1)
    const bool is_low = m < 0.707106781186547524f;
    exponent = is_low ? exponent - 1.f : exponent;
    m = is_low ? m + m - 1.f : m - 1.f;
    const float z = m * m;
    float y = 7.0376836292e-2f;
    y = y * m - 1.1514610310e-1f;
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

// Clamped to [exp(-80), exp(80)]. Relative error below 2e-7.
inline float exp_of(float x) {
    x = std::min(std::max(x, -80.f), 80.f);
    const float scaled = x * 1.44269504088896341f;
    const auto n = static_cast<std::int32_t>(scaled + (scaled >= 0.f ? 0.5f : -0.5f));
    const auto power = static_cast<float>(n);
    x = x - power * 0.693359375f + power * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.f;
    return y * std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
}

inline float sigmoid_of(float x) { return 1.f / (1.f + exp_of(-x)); }

// Log odds of a probability, taken to lie in [1e-5, 1 - 1e-5].
inline float logit_of(float prob) {
    const float p = std::min(std::max(prob, 1e-5f), 1.f - 1e-5f);
    return log_of(p / (1.f - p));
}

}  // namespace sglang_hvd
