#pragma once

#include <cstddef>
#include <vector>

#include "base/codec.h"
#include "base/dtype.h"
#include "base/reduction.h"

namespace dadt {

// The next step of SGD or Adam, as factors. With g = expected + parameter * decay, the step leads to
// parameter * keep + (momentum * `momentum` + g * `gradient`) / (sqrt(square * `square` + g * g * squared) *
// root + epsilon).
struct NextStep {
  double momentum, gradient, decay, keep, square, squared, root, epsilon;
};

// Loops over memory, in one table per instruction set. All tables give the same bits. Counts are in elements;
// addresses need only the alignment of their elements.
struct Kernels {
  // Computes destination = (sum over ranks of weights[r] * sources[r]) / divisor, added in the order of
  // ranks; in float32 for 16-bit floats, exactly and truncated for integers. weights: null if all are 1.
  // stream: write past the cache, since the destination is not read again soon.
  using Reduce = void (*)(void* destination, const void* const* sources, const double* weights, int ranks,
                          double divisor, size_t count, bool stream);
  // Computes the minimum, maximum or product of the sources. NaN results in NaN; products are computed like
  // the sums above, and integers wrap around.
  using Fold = void (*)(void* destination, const void* const* sources, int ranks, size_t count, bool stream);
  // Computes destination = factor * source.
  using Scale = void (*)(void* destination, const void* source, double factor, size_t count);
  // Computes displacement = parameter + factor * displacement. Null for dtypes that are not floating-point.
  using Predict = void (*)(const void* parameter, void* displacement, double factor, size_t count);
  // Computes ahead = the parameter after a step with the expected gradient, whose memory may be that of
  // `ahead`. momentum: null if there is none. square: null if the step is not divided. stream: as in Reduce.
  // Null for dtypes that are not floating-point.
  using Foresee = void (*)(const void* parameter, const void* expected, void* ahead, const void* momentum,
                           const void* square, const NextStep& step, size_t count, bool stream);
  // Copies source to destination, past the cache if `stream`.
  using Copy = void (*)(void* destination, const void* source, size_t bytes, bool stream);

  // Encodes a block of values; lost = values minus their decoded values, and not finite where values are not
  // finite.
  using Encode = void (*)(void* wire, const float* values, float* lost);
  // Adds weight * the decoded block to the values, or with `first` overwrites them.
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
  const Fold* min;  // a row with one loop per dtype, as for the two below
  const Fold* max;
  const Fold* product;
  Scale scale[kDTypes];
  Predict predict[kDTypes];
  Foresee foresee[kDTypes];
  Copy copy;
  Encode encode[kCodecs];  // null for Codec::kNone
  Decode decode[kCodecs];
  Gather gather[kFloatDTypes];
  Settle settle;
  Scatter scatter[kFloatDTypes];
};

// Outputs of at least this many bytes are written past the cache, which they would only fill with unused
// data.
inline constexpr size_t kStreamBytes = size_t{16} << 20;

// Returns the best table for this processor, always the same one.
const Kernels& kernels();

// Computes any reduction. weights and divisor are used only by a mean (as in Kernels::Reduce) and a sum
// (whose divisor is 1).
void reduce(DType dtype, Reduction reduction, void* destination, const void* const* sources,
            const double* weights, int ranks, double divisor, size_t count, bool stream);

// Computes ahead = the parameter after a step with the gradient sum(weights[s] * sources[s]), in one pass
// over memory: the sum of a block is still in the cache when it is used. Without sources, `ahead` contains
// that gradient. ahead: must not be the parameter's memory. stream: as in Kernels::Reduce. For floating-point
// dtypes.
void foresee(DType dtype, const void* parameter, void* ahead, const void* momentum, const void* square,
             const NextStep& step, const std::vector<const void*>& sources,
             const std::vector<double>& weights, size_t count, bool stream);

// Return the single tables, for tests; null if a table was not built or the processor cannot run it.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

}  // namespace dadt
