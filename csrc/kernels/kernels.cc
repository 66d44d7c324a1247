#include "kernels/kernels.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace dadt {

#if !defined(__x86_64__)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
#endif
#if !defined(__aarch64__)
const Kernels* neon_kernels() { return nullptr; }
#endif

const Kernels& kernels() {
  static const Kernels* const best = [] {
    for (const Kernels* table : {avx512_kernels(), avx2_kernels(), neon_kernels()}) {
      if (table != nullptr) return table;
    }
    return scalar_kernels();
  }();
  return *best;
}

void reduce(DType dtype, Reduction reduction, void* destination, const void* const* sources,
            const double* weights, int ranks, double divisor, size_t count, bool stream) {
  const Kernels& table = kernels();
  const int d = static_cast<int>(dtype);
  switch (reduction) {
    case Reduction::kMean:
      return table.reduce[d](destination, sources, weights, ranks, divisor, count, stream);
    case Reduction::kSum:
      return table.reduce[d](destination, sources, weights, ranks, 1, count, stream);
    case Reduction::kMin:
      return table.min[d](destination, sources, ranks, count, stream);
    case Reduction::kMax:
      return table.max[d](destination, sources, ranks, count, stream);
    case Reduction::kProduct:
      return table.product[d](destination, sources, ranks, count, stream);
  }
}

namespace {

// Bytes that are summed at a time, so that the sum and its sources fit into a core's first-level cache.
constexpr size_t kPassBytes = size_t{8} << 10;

const void* at(const void* address, size_t bytes) {
  return address == nullptr ? nullptr : static_cast<const uint8_t*>(address) + bytes;
}

}  // namespace

void foresee(DType dtype, const void* parameter, void* ahead, const void* momentum, const void* square,
             const NextStep& step, const std::vector<const void*>& sources,
             const std::vector<double>& weights, size_t count, bool stream) {
  const Kernels& table = kernels();
  const int d = static_cast<int>(dtype);
  const size_t item = item_size(dtype), block = kPassBytes / item;
  alignas(64) uint8_t sum[kPassBytes];
  std::vector<const void*> from(sources.size());
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t size = std::min(block, count - begin), offset = begin * item;
    void* to = static_cast<uint8_t*>(ahead) + offset;
    for (size_t s = 0; s < sources.size(); ++s) from[s] = at(sources[s], offset);
    if (!from.empty()) {
      table.reduce[d](sum, from.data(), weights.data(), static_cast<int>(from.size()), 1, size, false);
    }
    table.foresee[d](at(parameter, offset), from.empty() ? to : sum, to, at(momentum, offset),
                     at(square, offset), step, size, stream && !from.empty());
  }
}

}  // namespace dadt
