// Compiled with -mavx2 -mf16c; used only if the processor supports these instructions.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/number.h"

namespace dadt {
namespace {

struct F32 {
  static constexpr size_t kWidth = 8;
  __m256 v;

  static F32 fill(float x) { return {_mm256_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F32 load(const Half* p) { return {_mm256_cvtph_ps(halves(p))}; }
  static F32 load(const BFloat* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves(p)), 16))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(Half* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half()); }
  void store(BFloat* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bfloat()); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  void stream(Half* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_half()); }
  void stream(BFloat* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bfloat()); }
  F32 operator+(F32 other) const { return {_mm256_add_ps(v, other.v)}; }
  F32 operator*(F32 other) const { return {_mm256_mul_ps(v, other.v)}; }
  F32 operator/(F32 other) const { return {_mm256_div_ps(v, other.v)}; }
  F32 root() const { return {_mm256_sqrt_ps(v)}; }
  uint32_t signs() const { return static_cast<uint32_t>(_mm256_movemask_ps(v)); }
  static F32 of_signs(uint32_t signs, float magnitude) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i there = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(signs)), bits);
    const __m256i minus = _mm256_slli_epi32(_mm256_cmpeq_epi32(there, bits), 31);
    return {_mm256_xor_ps(_mm256_set1_ps(magnitude), _mm256_castsi256_ps(minus))};
  }

 private:
  static __m128i halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  __m128i to_half() const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  __m128i to_bfloat() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i biased = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i rounded = _mm256_srli_epi32(biased, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i wide = _mm256_blendv_epi8(rounded, quiet, nan);
    // each 128-bit half contains its four values twice
    const __m256i packed = _mm256_packus_epi32(wide, wide);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
};

struct F64 {
  static constexpr size_t kWidth = 4;
  __m256d v;

  static F64 fill(double x) { return {_mm256_set1_pd(x)}; }
  static F64 load(const double* p) { return {_mm256_loadu_pd(p)}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  void stream(double* p) const { _mm256_stream_pd(p, v); }
  F64 operator+(F64 other) const { return {_mm256_add_pd(v, other.v)}; }
  F64 operator*(F64 other) const { return {_mm256_mul_pd(v, other.v)}; }
  F64 operator/(F64 other) const { return {_mm256_div_pd(v, other.v)}; }
  F64 root() const { return {_mm256_sqrt_pd(v)}; }
};

// The instructions for min and max return the second operand if one is NaN or both are zero, so a NaN in the
// first operand is selected by a blend.
inline F32 lesser(F32 a, F32 b) {
  return {_mm256_blendv_ps(_mm256_min_ps(a.v, b.v), a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
inline F32 greater(F32 a, F32 b) {
  return {_mm256_blendv_ps(_mm256_max_ps(a.v, b.v), a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
inline F64 lesser(F64 a, F64 b) {
  return {_mm256_blendv_pd(_mm256_min_pd(a.v, b.v), a.v, _mm256_cmp_pd(a.v, a.v, _CMP_UNORD_Q))};
}
inline F64 greater(F64 a, F64 b) {
  return {_mm256_blendv_pd(_mm256_max_pd(a.v, b.v), a.v, _mm256_cmp_pd(a.v, a.v, _CMP_UNORD_Q))};
}

inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace dadt

#include "kernels/loops.h"

namespace dadt {

const Kernels* avx2_kernels() {
  static constexpr Kernels kTable = make_kernels("avx2");
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return runs ? &kTable : nullptr;
}

}  // namespace dadt
