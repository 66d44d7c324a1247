#pragma once

#include <cstdint>

namespace dadt {

// The reductions of an allreduce. A rank with weight 0 is left out of every reduction, unless all ranks have
// weight 0.
enum class Reduction : uint32_t { kMean = 0, kSum, kMin, kMax, kProduct };
inline constexpr int kReductions = 5;
inline constexpr const char* kReductionNames[kReductions] = {"mean", "sum", "min", "max", "product"};
inline const char* reduction_name(Reduction reduction) {
  return kReductionNames[static_cast<int>(reduction)];
}

}  // namespace dadt
