// Compiled with -mavx512f -mavx512bw -mavx512vl -mf16c; used only if the processor supports these
// instructions.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/number.h"

namespace dadt {
namespace {

struct F32 {
  static constexpr size_t kWidth = 16;
  __m512 v;

  static F32 fill(float x) { return {_mm512_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F32 load(const Half* p) { return {_mm512_cvtph_ps(halves(p))}; }
  static F32 load(const BFloat* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p)), 16))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(Half* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half()); }
  void store(BFloat* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat()); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  void stream(Half* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_half()); }
  void stream(BFloat* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bfloat()); }
  F32 operator+(F32 other) const { return {_mm512_add_ps(v, other.v)}; }
  F32 operator*(F32 other) const { return {_mm512_mul_ps(v, other.v)}; }
  F32 operator/(F32 other) const { return {_mm512_div_ps(v, other.v)}; }
  F32 root() const { return {_mm512_sqrt_ps(v)}; }
  uint32_t signs() const { return _mm512_cmplt_epi32_mask(_mm512_castps_si512(v), _mm512_setzero_si512()); }
  static F32 of_signs(uint32_t signs, float magnitude) {
    const __m512i plus = _mm512_castps_si512(_mm512_set1_ps(magnitude));
    const __m512i minus = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
    return {_mm512_castsi512_ps(_mm512_mask_xor_epi32(plus, static_cast<__mmask16>(signs), plus, minus))};
  }

 private:
  static __m256i halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  __m256i to_half() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  __m256i to_bfloat() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i biased = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i rounded = _mm512_srli_epi32(biased, 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
  }
};

struct F64 {
  static constexpr size_t kWidth = 8;
  __m512d v;

  static F64 fill(double x) { return {_mm512_set1_pd(x)}; }
  static F64 load(const double* p) { return {_mm512_loadu_pd(p)}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  void stream(double* p) const { _mm512_stream_pd(p, v); }
  F64 operator+(F64 other) const { return {_mm512_add_pd(v, other.v)}; }
  F64 operator*(F64 other) const { return {_mm512_mul_pd(v, other.v)}; }
  F64 operator/(F64 other) const { return {_mm512_div_pd(v, other.v)}; }
  F64 root() const { return {_mm512_sqrt_pd(v)}; }
};

// The instructions for min and max return the second operand if one is NaN or both are zero, so a NaN in the
// first operand is selected by a mask.
inline F32 lesser(F32 a, F32 b) {
  return {_mm512_mask_mov_ps(_mm512_min_ps(a.v, b.v), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
inline F32 greater(F32 a, F32 b) {
  return {_mm512_mask_mov_ps(_mm512_max_ps(a.v, b.v), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
inline F64 lesser(F64 a, F64 b) {
  return {_mm512_mask_mov_pd(_mm512_min_pd(a.v, b.v), _mm512_cmp_pd_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
inline F64 greater(F64 a, F64 b) {
  return {_mm512_mask_mov_pd(_mm512_max_pd(a.v, b.v), _mm512_cmp_pd_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}

inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace dadt

#include "kernels/loops.h"

namespace dadt {

const Kernels* avx512_kernels() {
  static constexpr Kernels kTable = make_kernels("avx512");
  const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl");
  return runs ? &kTable : nullptr;
}

}  // namespace dadt
