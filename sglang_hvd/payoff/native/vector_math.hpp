// Logarithm and exponential of several values at a time. Registers of all widths give the same bits: the
// functions are polynomials of the Cephes library, without fused multiply-add (see CMakeLists.txt).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SGLANG_HVD_HAS_X86 1
#else
#define SGLANG_HVD_HAS_X86 0
#endif

namespace sglang_hvd {

// Arrays are padded to a multiple of the widest registers.
constexpr int kMaxLanes = 16;

template <int kLanes>
struct Vector {  // GCC accepts a size that depends on a template parameter only in a typedef
    typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
    typedef std::int32_t Ints __attribute__((vector_size(kLanes * sizeof(std::int32_t))));
    typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
};
template <int kLanes>
using Floats = typename Vector<kLanes>::Floats;
template <int kLanes>
using Ints = typename Vector<kLanes>::Ints;

// Floats that fit a register of this machine. The compiler keeps a wider vector in memory and computes value
// by value, which takes about twenty times as long.
inline int widest_lanes() {
#if SGLANG_HVD_HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 16;
    if (__builtin_cpu_supports("avx2")) return 8;
#endif
    return 4;
}

inline const int kWidestLanes = widest_lanes();
inline int lanes_in_use = kWidestLanes;

// Vectors of other widths give the same bits. Tests use this to run all of the code on any machine.
inline void use_lanes(int lanes) {
    if (lanes != 4 && lanes != 8 && lanes != 16)
        throw std::invalid_argument("lanes must be 4, 8 or 16");
    lanes_in_use = lanes;
}

namespace detail {

template <class Body>
[[gnu::noinline]] void in_memory(const Body& body, int lanes) {
    return lanes == 16 ? body.template operator()<16>() : body.template operator()<8>();
}
#if SGLANG_HVD_HAS_X86
template <class Body>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::noinline]] void in_16_lanes(const Body& body) {
    body.template operator()<16>();
}
template <class Body>
[[gnu::target("avx2"), gnu::noinline]] void in_8_lanes(const Body& body) {
    body.template operator()<8>();
}
#endif

}  // namespace detail

// Runs body.operator()<kLanes>(), compiled for the registers in use. The body, and all functions that it passes
// vectors to, must be always_inline.
template <class Body>
void in_lanes(const Body& body) {
    const int lanes = lanes_in_use;
    if (lanes == 4) return body.template operator()<4>();
#if SGLANG_HVD_HAS_X86
    if (lanes <= kWidestLanes) return lanes == 16 ? detail::in_16_lanes(body) : detail::in_8_lanes(body);
#endif
    detail::in_memory(body, lanes);
}

template <class F>
using IntsLike = Ints<sizeof(F) / sizeof(float)>;

template <class F>
[[gnu::always_inline]] inline F load(const float* values) {
    F lanes;
    std::memcpy(&lanes, values, sizeof(lanes));
    return lanes;
}
template <class F>
[[gnu::always_inline]] inline void store(const F& lanes, float* values) {
    std::memcpy(values, &lanes, sizeof(lanes));
}

// For positive values in the normal range of float. Relative error below 2e-7.
template <class F>
[[gnu::always_inline]] inline F log_of(F x) {
    using I = IntsLike<F>;
    const auto bits = std::bit_cast<I>(x);
    F exponent = __builtin_convertvector((bits >> 23) - 126, F);
    F m = std::bit_cast<F>((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
    const I is_low = m < 0.707106781186547524f;
    exponent = is_low ? exponent - 1.f : exponent;
    m = is_low ? m + m - 1.f : m - 1.f;
    const F z = m * m;
    F y = 7.0376836292e-2f * m - 1.1514610310e-1f;
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

template <class F>
[[gnu::always_inline]] inline F clamp_of(F x, float low, float high) {
    x = x < low ? F{} + low : x;
    return x > high ? F{} + high : x;
}

// The result is clamped to [exp(-80), exp(80)]. Relative error below 2e-7.
template <class F>
[[gnu::always_inline]] inline F exp_of(F x) {
    x = clamp_of(x, -80.f, 80.f);
    const F scaled = x * 1.44269504088896341f;
    const auto n = __builtin_convertvector(scaled + (scaled >= 0.f ? F{} + 0.5f : F{} - 0.5f), IntsLike<F>);
    const F power = __builtin_convertvector(n, F);
    x = x - power * 0.693359375f + power * 2.12194440e-4f;
    F y = 1.9875691500e-4f * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.f;
    return y * std::bit_cast<F>((n + 127) << 23);
}

template <class F>
[[gnu::always_inline]] inline F sigmoid_of(F x) {
    return 1.f / (1.f + exp_of(-x));
}

// Log odds of probabilities, which are clamped to [1e-5, 1 - 1e-5].
template <class F>
[[gnu::always_inline]] inline F logit_of(F prob) {
    const F p = clamp_of(prob, 1e-5f, 1.f - 1e-5f);
    return log_of(p / (1.f - p));
}

}  // namespace sglang_hvd
