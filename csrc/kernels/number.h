#pragma once

#include <cstdint>
#include <cstring>

// Conversions of 16-bit floats without SIMD, for the ends of the SIMD loops and for the scalar table.
// Translation units that are compiled for different instruction sets include this file, so everything is in
// an unnamed namespace: otherwise the linker could use one unit's inline functions in another.
namespace dadt {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return from_bits(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {  // zero or subnormal: the value is exactly mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return from_bits(sign | to_bits(magnitude));
  }
  return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Convert a number to a smaller type, rounded to nearest, ties to even. NaN stays NaN.
inline void narrow(float x, float* y) { *y = x; }
inline void narrow(double x, double* y) { *y = x; }
inline void narrow(float x, BFloat* y) {
  const uint32_t bits = to_bits(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(float x, Half* y) {
  const uint32_t bits = to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // values of 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude <
             // Below 2^-14, adding 0.5 leaves the rounded mantissa in the low bits.
             0x38800000u) {
    half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  y->bits = static_cast<uint16_t>(sign | half);
}

inline float root_of(float x) { return __builtin_sqrtf(x); }
inline double root_of(double x) { return __builtin_sqrt(x); }

// Return the lesser and the greater of two numbers. If one is NaN, the result is NaN; of equal numbers (zeros
// of both signs) the second is returned.
inline float lesser(float a, float b) { return a < b || a != a ? a : b; }
inline float greater(float a, float b) { return a > b || a != a ? a : b; }
inline double lesser(double a, double b) { return a < b || a != a ? a : b; }
inline double greater(double a, double b) { return a > b || a != a ? a : b; }

}  // namespace
}  // namespace dadt
