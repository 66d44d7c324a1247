#pragma once

#include <cstddef>
#include <vector>

#include "base/codec.h"
#include "base/dtype.h"
#include "base/reduction.h"

namespace dadt {

// The next step of SGD or Adam, as factors. With g = expected + parameter * decay it leads to parameter *
// keep + (momentum * `momentum` + g * `gradient`) / (sqrt(square * `square` + g * g * squared) * root +
// epsilon).
struct NextStep {
  double momentum, gradient, decay, keep, square, squared, root, epsilon;
};

// Loops over memory, one table per instruction set. All tables give the same bits.
// Counts are in elements; addresses need the alignment of their elements only.
struct Kernels {
  // destination = (sum over ranks of weights[r] * sources[r]) / divisor, added in rank order; float32 for
  // 16-bit floats, exact integers truncated. weights null: all 1. stream: the destination is not read again
  // soon, so write it past the cache.
  using Reduce = void (*)(void* destination, const void* const* sources, const double* weights, int ranks,
                          double divisor, size_t count, bool stream);
  // destination = the least, greatest or product of the sources. A NaN stays one; products as sums above,
  // and whole numbers wrap.
  using Fold = void (*)(void* destination, const void* const* sources, int ranks, size_t count, bool stream);
  // destination = factor * source.
  using Scale = void (*)(void* destination, const void* source, double factor, size_t count);
  // displacement = parameter + factor * displacement. Floating dtypes, null for the others.
  using Predict = void (*)(const void* parameter, void* displacement, double factor, size_t count);
  // ahead = parameter after a step with the expected gradient; it may be that gradient's memory. momentum:
  // null where there is none; square: null where the step is not divided. stream: as above. Floating dtypes,
  // null for the others.
  using Foresee = void (*)(const void* parameter, const void* expected, void* ahead, const void* momentum,
                           const void* square, const NextStep& step, size_t count, bool stream);
  // destination = source, past the cache where stream.
  using Copy = void (*)(void* destination, const void* source, size_t bytes, bool stream);

  // A block of values to the wire; lost = values - what the wire says, no number where they are none.
  using Encode = void (*)(void* wire, const float* values, float* lost);
  // values = (first: nothing, else values) + weight * what the wire says.
  using Decode = void (*)(float* values, const void* wire, float weight, bool first);
  // values = source + keep * owed; null: zeros. Floating dtypes, in float32.
  using Gather = void (*)(float* values, const void* source, const float* owed, float keep, size_t count);
  // owed = lost; keep * owed where that is no number.
  using Settle = void (*)(float* owed, const float* lost, float keep, size_t count);
  // destination = factor * values, rounded once. Of finite values none becomes infinite in 16 bits.
  using Scatter = void (*)(void* destination, const float* values, float factor, size_t count);

  const char* name;
  Reduce reduce[kDTypes];
  const Fold* min;  // a row by dtype
  const Fold* max;
  const Fold* product;
  Scale scale[kDTypes];
  Predict predict[kDTypes];
  Foresee foresee[kDTypes];
  Copy copy;
  Encode encode[kCodecs];  // null for none
  Decode decode[kCodecs];
  Gather gather[kFloatDTypes];
  Settle settle;
  Scatter scatter[kFloatDTypes];
};

// Outputs of so many bytes and more are streamed: they would only wash the cache out.
inline constexpr size_t kStreamBytes = size_t{16} << 20;

// The best table for this processor. Constant.
const Kernels& kernels();

// Any reduction. weights and divisor: of a mean (as Kernels::Reduce) and a sum (divisor 1) only.
void reduce(DType dtype, Reduction reduction, void* destination, const void* const* sources,
            const double* weights, int ranks, double divisor, size_t count, bool stream);

// ahead = parameter after a step with sum(weights[s] * sources[s]), in one pass over memory: the sum of a
// block is still in the cache when its step is made. Without sources `ahead` holds that gradient. ahead: not
// the parameter's memory. stream: as of Kernels::reduce. Floating dtypes.
void foresee(DType dtype, const void* parameter, void* ahead, const void* momentum, const void* square,
             const NextStep& step, const std::vector<const void*>& sources,
             const std::vector<double>& weights, size_t count, bool stream);

// Each table by itself, for tests; null where it was not built or the processor cannot run it.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

}  // namespace dadt
