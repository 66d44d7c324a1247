#include <cstddef>
#include <cstdint>

#include "kernels/number.h"

namespace dadt {
namespace {

template <typename Scalar>
struct One {
  static constexpr size_t kWidth = 1;
  Scalar v;

  static One fill(Scalar x) { return {x}; }
  static One load(const auto* p) { return {widen(*p)}; }
  void store(auto* p) const { narrow(v, p); }
  void stream(auto* p) const { store(p); }
  One operator+(One other) const { return {v + other.v}; }
  One operator*(One other) const { return {v * other.v}; }
  One operator/(One other) const { return {v / other.v}; }
  One root() const { return {root_of(v)}; }
};
template <typename Scalar>
One<Scalar> lesser(One<Scalar> a, One<Scalar> b) {
  return {lesser(a.v, b.v)};
}
template <typename Scalar>
One<Scalar> greater(One<Scalar> a, One<Scalar> b) {
  return {greater(a.v, b.v)};
}
using F32 = One<float>;
using F64 = One<double>;

inline void stream_fence() {}

}  // namespace
}  // namespace dadt

#include "kernels/loops.h"

namespace dadt {

const Kernels* scalar_kernels() {
  static constexpr Kernels kTable = make_kernels("scalar");
  return &kTable;
}

}  // namespace dadt
