#include "kernels/kernels.h"

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

}  // namespace dadt
