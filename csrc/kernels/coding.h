#pragma once

// A block of values to the wire and back, for the tables; see loops.h. Plain loops where the compiler makes
// vectors of them. A finite number stays one; a block of whole numbers in which one is not becomes NaN.
#include <limits>

#include "base/codec.h"
#include "kernels/kernels.h"
#include "kernels/number.h"

namespace dadt {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;

// The bits of the greatest magnitude: of finite numbers below kInfinityBits.
inline int32_t greatest_bits(const float* values, size_t count = kBlock) {
  int32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t bits = static_cast<int32_t>(to_bits(values[i]) & 0x7fffffffu);
    most = bits > most ? bits : most;
  }
  return most;
}

inline float largest(Half) { return 65504.f; }
inline float largest(BFloat) { return from_bits(0x7f7f0000u); }

// The greatest magnitude that values may keep in 16 bits. Where one is no number, nothing is worth saving.
template <typename T>
float limit_of(const float* values, size_t count) {
  const bool finite = greatest_bits(values, count) < kInfinityBits;
  return finite ? largest(T()) : std::numeric_limits<float>::infinity();
}

// A value too large for 16 bits is sent as the largest, and the rest is lost.
template <typename T>
void encode_short(void* wire, const float* values, float* lost) {
  T* to = static_cast<T*>(wire);
  const float limit = limit_of<T>(values, kBlock);
  const F32 most = F32::fill(limit), least = F32::fill(-limit), minus = F32::fill(-1.f);
  for (size_t i = 0; i < kBlock; i += F32::kWidth) {
    const F32 x = F32::load(values + i);
    lesser(greater(x, least), most).store(to + i);
    (x + F32::load(to + i) * minus).store(lost + i);
  }
}

template <typename T>
void decode_short(float* values, const void* wire, float weight, bool first) {
  const T* from = static_cast<const T*>(wire);
  const F32 w = F32::fill(weight);
  for (size_t i = 0; i < kBlock; i += F32::kWidth) {
    const F32 x = F32::load(from + i) * w;
    (first ? x : F32::load(values + i) + x).store(values + i);
  }
}

// Of a block: 127 of it are the greatest magnitude. 0 where that is too small to divide by.
inline float scale_of(float most) {
  if (most < 1e-30f) return 0;
  const float scale = most / 127.f;
  return scale * 127.f > std::numeric_limits<float>::max() ? from_bits(to_bits(scale) - 1) : scale;
}

inline void encode_int8(void* wire, const float* __restrict__ values, float* __restrict__ lost) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded to nearest, ties to even
  uint8_t* to = static_cast<uint8_t*>(wire) + sizeof(float);
  const int32_t bits = greatest_bits(values);
  const bool finite = bits < kInfinityBits;
  const float scale =
      finite ? scale_of(from_bits(static_cast<uint32_t>(bits))) : std::numeric_limits<float>::quiet_NaN();
  std::memcpy(wire, &scale, sizeof scale);
  if (!finite || scale == 0) {
    std::memset(to, 0, kBlock);
    for (size_t i = 0; i < kBlock; ++i) lost[i] = finite ? values[i] : scale;
    return;
  }
  const float inverse = 1.f / scale;
  for (size_t i = 0; i < kBlock; ++i) {
    const float rounded = values[i] * inverse + kRound;
    to[i] = static_cast<uint8_t>(to_bits(rounded));  // the low bits: two's complement
    lost[i] = values[i] - (rounded - kRound) * scale;
  }
}

inline void decode_int8(float* __restrict__ values, const void* wire, float weight, bool first) {
  float scale;
  std::memcpy(&scale, wire, sizeof scale);
  const int8_t* from = static_cast<const int8_t*>(wire) + sizeof(float);
  const float factor = scale * weight;
  if (first) {
    for (size_t i = 0; i < kBlock; ++i) values[i] = static_cast<float>(from[i]) * factor;
  } else {
    for (size_t i = 0; i < kBlock; ++i) values[i] = values[i] + static_cast<float>(from[i]) * factor;
  }
}

template <typename T>
void gather_values(float* __restrict__ values, const void* source, const float* __restrict__ owed, float keep,
                   size_t count) {
  const T* from = static_cast<const T*>(source);
  if (source == nullptr) {
    for (size_t i = 0; i < count; ++i) values[i] = owed == nullptr ? 0 : owed[i] * keep;
  } else if (owed == nullptr) {
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(from[i]);
  } else {
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(from[i]) + owed[i] * keep;
  }
}

template <typename T>
void gather_short(float* __restrict__ values, const void* source, const float* __restrict__ owed, float keep,
                  size_t count) {
  if (source == nullptr) return gather_values<float>(values, source, owed, keep, count);
  const T* from = static_cast<const T*>(source);
  size_t i = 0;
  for (; i + F32::kWidth <= count; i += F32::kWidth) F32::load(from + i).store(values + i);
  for (; i < count; ++i) values[i] = widen(from[i]);
  if (owed == nullptr) return;
  for (i = 0; i < count; ++i) values[i] = values[i] + owed[i] * keep;
}

inline void settle(float* __restrict__ owed, const float* __restrict__ lost, float keep, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const bool finite = (to_bits(lost[i]) & 0x7fffffffu) < static_cast<uint32_t>(kInfinityBits);
    const float kept = owed[i] * keep;
    owed[i] = finite ? lost[i] : kept;
  }
}

template <typename T>
void scatter_values(void* destination, const float* __restrict__ values, float factor, size_t count) {
  T* to = static_cast<T*>(destination);
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i] * factor);
}

template <typename T>
void scatter_short(void* destination, const float* __restrict__ values, float factor, size_t count) {
  T* to = static_cast<T*>(destination);
  const float limit = limit_of<T>(values, count);
  const F32 most = F32::fill(limit), least = F32::fill(-limit), scale = F32::fill(factor);
  size_t i = 0;
  for (; i + F32::kWidth <= count; i += F32::kWidth) {
    lesser(greater(F32::load(values + i) * scale, least), most).store(to + i);
  }
  for (; i < count; ++i) narrow(lesser(greater(values[i] * factor, -limit), limit), to + i);
}

}  // namespace
}  // namespace dadt
