#pragma once

#include <cstddef>
#include <vector>

#include "base/codec.h"
#include "base/dtype.h"
#include "base/reduction.h"

namespace dadt {

// Factors that describe the next step of SGD or Adam. With these factors in backticks and g = expected +
// parameter * `decay`, the parameter becomes parameter * `keep` + (momentum * `momentum` + g * `gradient`) /
// (sqrt(square * `square` + g * g * `squared`) * `root` + `epsilon`).
struct NextStep {
  double momentum, gradient, decay, keep, square, squared, root, epsilon;
};

// Factors of Adam's next step t, with which its second moment becomes at least the square of its momentum.
// fresh: 1 - beta1. rest: 1 - beta2^t, by which Adam divides the second moment. growth: by how much that has
// grown since the step before.
struct MomentStep {
  double fresh, beta2, rest, growth;
};

// A table of loops over memory for one instruction set. The tables of all instruction sets give the same
// bits. Counts are in elements; addresses need only the alignment of their elements.
struct Kernels {
  // Computes destination = (sum over ranks of weights[r] * sources[r]) / divisor, added in the order of
  // ranks, in float32 for 16-bit floats. Integers are truncated after the division. weights: null if all are
  // 1. stream: whether to write past the cache, since the destination is not read again soon.
  using Reduce = void (*)(void* destination, const void* const* sources, const double* weights, int ranks,
                          double divisor, size_t count, bool stream);
  // Computes the minimum, maximum or product of the sources. If a source is NaN, so is the result. Products
  // of 16-bit floats are computed in float32; those of integers wrap around.
  using Fold = void (*)(void* destination, const void* const* sources, int ranks, size_t count, bool stream);
  // Computes destination = factor * source.
  using Scale = void (*)(void* destination, const void* source, double factor, size_t count);
  // Computes displacement = parameter + factor * displacement. There is no such loop (null) for integers.
  using Predict = void (*)(const void* parameter, void* displacement, double factor, size_t count);
  // Computes ahead = the parameter after a step with the gradient `expected`, which may be the same memory as
  // `ahead`. momentum: null if the optimizer has none. square: mean of squared gradients, for Adam; otherwise
  // null. stream: as in Reduce. There is no such loop (null) for integers.
  using Foresee = void (*)(const void* parameter, const void* expected, void* ahead, const void* momentum,
                           const void* square, const NextStep& step, size_t count, bool stream);
  // Sets square to (max(square * growth, m * m * rest) - (1 - beta2) * gradient^2) / beta2, where m is the
  // momentum after the coming step, so that this step makes it max(square * growth, m * m * rest). There is
  // no such loop (null) for integers.
  using Confine = void (*)(void* square, const void* momentum, const void* gradient, const MomentStep& step,
                           size_t count);
  // Copies source to destination, past the cache if `stream`.
  using Copy = void (*)(void* destination, const void* source, size_t bytes, bool stream);

  // Encodes a block of values, and computes lost = values minus their decoded values, which is not finite
  // where a value is not finite.
  using Encode = void (*)(void* wire, const float* values, float* lost);
  // Adds weight * the decoded block to `values`; with `first`, overwrites `values` instead.
  using Decode = void (*)(float* values, const void* wire, float weight, bool first);
  // Computes values = source + keep * owed in float32; a null pointer stands for zeros. For floating-point
  // dtypes.
  using Gather = void (*)(float* values, const void* source, const float* owed, float keep, size_t count);
  // Sets owed = lost, or keep * owed where `lost` is not finite.
  using Settle = void (*)(float* owed, const float* lost, float keep, size_t count);
  // Computes destination = factor * values, rounded once. No finite value becomes infinite in 16 bits.
  using Scatter = void (*)(void* destination, const float* values, float factor, size_t count);

  const char* name;
  Reduce reduce[kDTypes];
  const Fold* min;  // points to one loop per dtype, as do `max` and `product`
  const Fold* max;
  const Fold* product;
  Scale scale[kDTypes];
  Predict predict[kDTypes];
  Foresee foresee[kDTypes];
  Confine confine[kDTypes];
  Copy copy;
  Encode encode[kCodecs];  // null for Codec::kNone
  Decode decode[kCodecs];
  Gather gather[kFloatDTypes];
  Settle settle;
  Scatter scatter[kFloatDTypes];
};

// Outputs of at least this many bytes are written past the cache, since they would displace all other data
// from it.
inline constexpr size_t kStreamBytes = size_t{16} << 20;

// Returns the table of the best instruction set that this processor has; the same one in every call.
const Kernels& kernels();

// Computes any reduction. Only a mean and a sum use `weights`, and only a mean uses `divisor`, as in
// Kernels::Reduce.
void reduce(DType dtype, Reduction reduction, void* destination, const void* const* sources,
            const double* weights, int ranks, double divisor, size_t count, bool stream);

// Computes ahead = the parameter after a step with the gradient sum(weights[s] * sources[s]), in one pass
// over memory, so that each part of the sum is still in the cache when it is used. Without sources, `ahead`
// must contain the gradient. ahead: must not be the parameter's memory. stream: as in Kernels::Reduce. For
// floating-point dtypes.
void foresee(DType dtype, const void* parameter, void* ahead, const void* momentum, const void* square,
             const NextStep& step, const std::vector<const void*>& sources,
             const std::vector<double>& weights, size_t count, bool stream);

// Return the table for one instruction set, for tests; null if it was not built or the processor cannot run
// it.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

}  // namespace dadt
