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

}  // namespace dadt
