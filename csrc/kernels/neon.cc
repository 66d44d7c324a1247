// Compiled for aarch64, whose base instruction set includes NEON and its half-precision conversions.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/number.h"

namespace dadt {
namespace {

struct F32 {
  static constexpr size_t kWidth = 4;
  float32x4_t v;

  static F32 fill(float x) { return {vdupq_n_f32(x)}; }
  static F32 load(const float* p) { return {vld1q_f32(p)}; }
  static F32 load(const Half* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))}; }
  static F32 load(const BFloat* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))}; }
  void store(float* p) const { vst1q_f32(p, v); }
  void store(Half* p) const { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  void store(BFloat* p) const {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t high = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
    const uint32x4_t number = vceqq_f32(v, v);
    const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
    vst1_u16(&p->bits, vmovn_u32(vbslq_u32(number, rounded, quiet)));
  }
  void stream(auto* p) const { store(p); }
  F32 operator+(F32 other) const { return {vaddq_f32(v, other.v)}; }
  F32 operator*(F32 other) const { return {vmulq_f32(v, other.v)}; }
  F32 operator/(F32 other) const { return {vdivq_f32(v, other.v)}; }
  F32 root() const { return {vsqrtq_f32(v)}; }
};

struct F64 {
  static constexpr size_t kWidth = 2;
  float64x2_t v;

  static F64 fill(double x) { return {vdupq_n_f64(x)}; }
  static F64 load(const double* p) { return {vld1q_f64(p)}; }
  void store(double* p) const { vst1q_f64(p, v); }
  void stream(double* p) const { store(p); }
  F64 operator+(F64 other) const { return {vaddq_f64(v, other.v)}; }
  F64 operator*(F64 other) const { return {vmulq_f64(v, other.v)}; }
  F64 operator/(F64 other) const { return {vdivq_f64(v, other.v)}; }
  F64 root() const { return {vsqrtq_f64(v)}; }
};

// The instructions vminq and vmaxq are not used, since for two zeros or two NaNs they choose another operand
// than the other tables of kernels.
inline F32 lesser(F32 a, F32 b) {
  return {vbslq_f32(vorrq_u32(vcltq_f32(a.v, b.v), vmvnq_u32(vceqq_f32(a.v, a.v))), a.v, b.v)};
}
inline F32 greater(F32 a, F32 b) {
  return {vbslq_f32(vorrq_u32(vcgtq_f32(a.v, b.v), vmvnq_u32(vceqq_f32(a.v, a.v))), a.v, b.v)};
}
inline uint64x2_t nan(F64 a) { return veorq_u64(vceqq_f64(a.v, a.v), vdupq_n_u64(~uint64_t{0})); }
inline F64 lesser(F64 a, F64 b) { return {vbslq_f64(vorrq_u64(vcltq_f64(a.v, b.v), nan(a)), a.v, b.v)}; }
inline F64 greater(F64 a, F64 b) { return {vbslq_f64(vorrq_u64(vcgtq_f64(a.v, b.v), nan(a)), a.v, b.v)}; }

inline void stream_fence() {}

}  // namespace
}  // namespace dadt

#include "kernels/loops.h"

namespace dadt {

const Kernels* neon_kernels() {
  static constexpr Kernels kTable = make_kernels("neon");
  return &kTable;
}

}  // namespace dadt
