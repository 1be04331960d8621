// Inference of the predictors. A row's result has the same bits whatever the other rows are and whatever
// the width of the registers: the terms of each output are added in the order of the inputs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "features.hpp"
#include "vector_math.hpp"

namespace sglang_hvd {

namespace detail {

// out[r][o] = bias[o] + sum over i of in[r][i] * weight[i][o], for kRows rows and the outputs from
// first on that fill kVectors. The sums stay in registers.
template <int kLanes, int kRows, int kVectors>
[[gnu::always_inline]] inline void affine_block(const float* in, std::size_t num_in,
                                                const float* weight, const float* bias,
                                                std::size_t num_out, std::size_t first,
                                                bool is_rectified, float* out) {
    using F = Floats<kLanes>;
    // Copying an array as a whole would put it in memory, so each vector is copied alone.
    F sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load<F>(bias + first + v * kLanes);
    for (std::size_t i = 0; i < num_in; ++i) {
        for (int v = 0; v < kVectors; ++v) {
            const F w = load<F>(weight + i * num_out + first + v * kLanes);
            for (int r = 0; r < kRows; ++r) sums[r][v] += in[r * num_in + i] * w;
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            const F sum = sums[r][v];
            store(is_rectified ? (sum > 0 ? sum : F{}) : sum, out + r * num_out + first + v * kLanes);
        }
    }
}

// All outputs from first on, in blocks of kVectors and the rest in smaller blocks.
template <int kLanes, int kRows, int kVectors>
[[gnu::always_inline]] inline void affine_rows(const float* in, std::size_t num_in,
                                               const float* weight, const float* bias,
                                               std::size_t num_out, std::size_t first,
                                               bool is_rectified, float* out) {
    for (; first + kVectors * kLanes <= num_out; first += kVectors * kLanes)
        affine_block<kLanes, kRows, kVectors>(in, num_in, weight, bias, num_out, first, is_rectified, out);
    if constexpr (kVectors > 1)
        affine_rows<kLanes, kRows, kVectors - 1>(in, num_in, weight, bias, num_out, first, is_rectified,
                                                 out);
}

inline void affine(const float* in, std::size_t num_rows, std::size_t num_in, const float* weight,
                   const float* bias, std::size_t num_out, bool is_rectified, float* out) {
    in_lanes([=]<int kLanes>() __attribute__((always_inline)) {
        // There are twice as many registers of sixteen lanes. Three vectors instead of two then take .9 of
        // the time for 64 rows (AMD EPYC 9004); with eight lanes they take 1.3 times as long.
        constexpr int kVectors = kLanes == 16 ? 3 : 2;
        std::size_t row = 0;
        for (; row + 4 <= num_rows; row += 4)
            affine_rows<kLanes, 4, kVectors>(in + row * num_in, num_in, weight, bias, num_out, 0,
                                             is_rectified, out + row * num_out);
        for (; row < num_rows; ++row)
            affine_rows<kLanes, 1, 4>(in + row * num_in, num_in, weight, bias, num_out, 0,
                                      is_rectified, out + row * num_out);
    });
}

inline void normalise(const float* in, const float* mean, const float* scale, std::size_t num,
                      float* __restrict out) {
    for (std::size_t i = 0; i < num; ++i) out[i] = (in[i] - mean[i]) * scale[i];
}

}  // namespace detail

// A multilayer perceptron with ReLU between its layers. It normalises its inputs.
class Network {
public:
    struct Layer {
        std::size_t num_in = 0, num_out = 0, num_padded = 0;
        // num_padded: num_out, rounded up to a multiple of kMaxLanes. weight: [num_in][num_padded].
        std::vector<float> weight, bias;
    };

    Network(std::span<const float> mean, std::span<const float> std) {
        mean_.assign(mean.begin(), mean.end());
        for (const float value : std) scale_.push_back(1.f / value);
    }

    // weight: row-major [num_out][num_in].
    void add_layer(std::span<const float> weight, std::span<const float> bias) {
        Layer layer;
        layer.num_out = bias.size();
        layer.num_padded = (bias.size() + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
        const std::size_t real_in = weight.size() / bias.size();
        layer.num_in = layers_.empty() ? real_in : layers_.back().num_padded;
        layer.weight.resize(layer.num_in * layer.num_padded);
        for (std::size_t o = 0; o < layer.num_out; ++o)
            for (std::size_t i = 0; i < real_in; ++i)
                layer.weight[i * layer.num_padded + o] = weight[o * real_in + i];
        layer.bias.assign(bias.begin(), bias.end());
        layer.bias.resize(layer.num_padded);
        layers_.push_back(std::move(layer));
    }

    std::size_t num_in() const { return mean_.size(); }
    std::size_t num_out() const { return layers_.back().num_out; }
    std::size_t num_padded_out() const { return layers_.back().num_padded; }

    // rows: [num_rows][stride], of which the first num_in() columns are read. Returns
    // [num_rows][num_padded_out()], valid until the next call.
    const float* run(const float* rows, std::size_t num_rows, std::size_t stride) {
        current_.resize(num_rows * num_in());
        for (std::size_t r = 0; r < num_rows; ++r)
            detail::normalise(rows + r * stride, mean_.data(), scale_.data(), num_in(),
                              current_.data() + r * num_in());
        for (const Layer& layer : layers_) {
            next_.resize(num_rows * layer.num_padded);
            detail::affine(current_.data(), num_rows, layer.num_in, layer.weight.data(),
                           layer.bias.data(), layer.num_padded, &layer != &layers_.back(), next_.data());
            std::swap(current_, next_);
        }
        return current_.data();
    }

private:
    std::vector<float> mean_, scale_;
    std::vector<Layer> layers_;
    std::vector<float> current_, next_;
};

// A network of kind survival has one output for each bucket of depths, then one for each position feature.
constexpr int kNumBuckets = 21;

// Positions 0 to 15 have a bucket each; then come the tokens 17-20, 21-24, 25-32, 33-48, 49-64.
constexpr int bucket_of(int position) {
    if (position < 16) return position;
    if (position < 20) return 16;
    if (position < 24) return 17;
    if (position < 32) return 18;
    return position < 48 ? 19 : 20;
}
constexpr auto kBuckets = [] {
    std::array<std::uint8_t, kMaxDepth> buckets{};
    for (int j = 0; j < kMaxDepth; ++j) buckets[j] = static_cast<std::uint8_t>(bucket_of(j));
    return buckets;
}();

// Writes the probability that more than j tokens of a draft are accepted: the product of the probabilities
// that each token up to j is accepted if those before it are.
// positions: [kNumPositionFeatures][kMaxDepth]. acceptance: [kMaxDepth], of which the first num_tokens are
// written. Returns their sum, the predicted accepted length. Outputs that overflow, which no trained weights
// give, count as a draft that is not accepted.
inline float write_acceptance(const float* outputs, const float* positions, int num_tokens,
                              float* acceptance) {
    const int num = std::min(num_tokens, kMaxDepth);
    float probs[kMaxDepth];
    for (int j = 0; j < kMaxDepth; ++j) probs[j] = outputs[kBuckets[j]];
    in_lanes([&]<int kLanes>() __attribute__((always_inline)) {
        using F = Floats<kLanes>;
        for (int first = 0; first < num; first += kLanes) {
            F sum = load<F>(probs + first);
            for (int k = 0; k < kNumPositionFeatures; ++k)
                sum += load<F>(positions + k * kMaxDepth + first) * outputs[kNumBuckets + k];
            store(sigmoid_of(sum), probs + first);
        }
    });
    float prob = 1, sum = 0;
    for (int j = 0; j < num; ++j) {
        prob *= probs[j] >= 0 ? probs[j] : 0;  // false for NaN
        acceptance[j] = prob;
        sum += prob;
    }
    return sum;
}

}  // namespace sglang_hvd
