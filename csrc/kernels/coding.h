#pragma once

// Encodes and decodes blocks of values, for the tables of kernels; see loops.h. Loops that the compiler
// vectorizes itself use no vector types. Finite numbers stay finite; a block with a scale becomes NaN if it
// contains a number that is not finite.
#include <limits>

#include "base/codec.h"
#include "kernels/kernels.h"
#include "kernels/number.h"

namespace dadt {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;

// Returns the bit pattern of the greatest magnitude among the values, which is below kInfinityBits if all
// values are finite.
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

// Returns the largest magnitude of the 16-bit type, to which values are clamped; infinity, so that nothing is
// clamped, if some value is not finite.
template <typename T>
float limit_of(const float* values, size_t count) {
  const bool finite = greatest_bits(values, count) < kInfinityBits;
  return finite ? largest(T()) : std::numeric_limits<float>::infinity();
}

// Encodes values as 16-bit floats. A value beyond their range is encoded as the largest number of the format.
// `lost` becomes the difference between each value and its encoded form.
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

// A block's integers range from -kMost to kMost. put packs integers that are given in the low bits of floats,
// in two's complement; get unpacks them and converts them to floats.
struct Int8 {
  static constexpr Codec kCodec = Codec::kInt8;
  static constexpr float kMost = 127;

  static void put(uint8_t* __restrict__ to, const float* __restrict__ rounded) {
    for (size_t i = 0; i < kBlock; ++i) to[i] = static_cast<uint8_t>(to_bits(rounded[i]));
  }
  static void get(float* __restrict__ to, const uint8_t* __restrict__ from) {
    for (size_t i = 0; i < kBlock; ++i) to[i] = static_cast<float>(static_cast<int8_t>(from[i]));
  }
};

struct Int4 {
  static constexpr Codec kCodec = Codec::kInt4;
  static constexpr float kMost = 7;

  static void put(uint8_t* __restrict__ to, const float* __restrict__ rounded) {
    for (size_t i = 0; i < kBlock / 2; ++i) {
      const uint32_t low = to_bits(rounded[2 * i]), high = to_bits(rounded[2 * i + 1]);
      to[i] = static_cast<uint8_t>((low & 15u) | (high << 4));
    }
  }
  static void get(float* __restrict__ to, const uint8_t* __restrict__ from) {
    for (size_t i = 0; i < kBlock / 2; ++i) {
      const uint32_t both = from[i];
      to[2 * i] = static_cast<float>(static_cast<int32_t>(both << 28) >> 28);
      to[2 * i + 1] = static_cast<float>(static_cast<int32_t>(both << 24) >> 28);
    }
  }
};

// Returns a block's scale, which times `levels` is the block's greatest magnitude `most`; 0 if `most` is too
// small to divide by.
inline float scale_of(float most, float levels) {
  if (most < 1e-30f) return 0;
  const float scale = most / levels;
  return scale * levels > std::numeric_limits<float>::max() ? from_bits(to_bits(scale) - 1) : scale;
}

template <typename Integer>
void encode_integers(void* wire, const float* __restrict__ values, float* __restrict__ lost) {
  // Adding 1.5 * 2^23 rounds a number to the nearest integer, ties to even.
  constexpr float kRound = 12582912.f;
  uint8_t* to = static_cast<uint8_t*>(wire) + sizeof(float);
  const int32_t bits = greatest_bits(values);
  const bool finite = bits < kInfinityBits;
  const float scale = finite ? scale_of(from_bits(static_cast<uint32_t>(bits)), Integer::kMost)
                             : std::numeric_limits<float>::quiet_NaN();
  std::memcpy(wire, &scale, sizeof scale);
  if (!finite || scale == 0) {
    std::memset(to, 0, block_bytes(Integer::kCodec) - sizeof scale);
    for (size_t i = 0; i < kBlock; ++i) lost[i] = finite ? values[i] : scale;
    return;
  }
  const float inverse = 1.f / scale;
  for (size_t i = 0; i < kBlock; ++i) lost[i] = values[i] * inverse + kRound;
  Integer::put(to, lost);
  for (size_t i = 0; i < kBlock; ++i) lost[i] = values[i] - (lost[i] - kRound) * scale;
}

template <typename Integer>
void decode_integers(float* __restrict__ values, const void* wire, float weight, bool first) {
  float scale;
  std::memcpy(&scale, wire, sizeof scale);
  const uint8_t* from = static_cast<const uint8_t*>(wire) + sizeof(float);
  const float factor = scale * weight;
  float wholes[kBlock];
  Integer::get(wholes, from);
  if (first) {
    for (size_t i = 0; i < kBlock; ++i) values[i] = wholes[i] * factor;
  } else {
    for (size_t i = 0; i < kBlock; ++i) values[i] = values[i] + wholes[i] * factor;
  }
}

// Returns the mean magnitude of a block. The two halves are added, then the halves of the result and so on,
// an order that all vector widths can follow.
inline float mean_magnitude(const float* __restrict__ values) {
  float sums[kBlock / 2];
  constexpr float kShare = 1.f / kBlock;  // applied before summing, since the sum could overflow
  constexpr size_t half = kBlock / 2;
  for (size_t i = 0; i < half; ++i) {
    sums[i] = __builtin_fabsf(values[i]) * kShare + __builtin_fabsf(values[i + half]) * kShare;
  }
  for (size_t some = half / 2; some > 0; some /= 2) {
    for (size_t i = 0; i < some; ++i) sums[i] = sums[i] + sums[i + some];
  }
  return sums[0];
}

// Two bits per value: a sign and one of two magnitudes, kLow or kHigh times the block's mean magnitude.
// Values of more than kCut times the mean get kHigh. Max (1960) and Lloyd (1982) found these constants to be
// best for normally distributed numbers.
struct Bits2 {
  static constexpr Codec kCodec = Codec::kBits2;
  static constexpr float kLow = 0.56750f, kCut = 1.23025f, kHigh = 1.89250f;
  static constexpr float kMost = 1.7e38f;  // largest scale for which kHigh times the scale is finite

  static void put(uint8_t* __restrict__ to, const float* __restrict__ said, float high) {
    for (size_t i = 0; i < kBlock / 4; ++i) {
      uint32_t byte = 0;
      for (size_t k = 0; k < 4; ++k) {
        const uint32_t bits = to_bits(said[4 * i + k]);
        const uint32_t large = (bits & 0x7fffffffu) == to_bits(high) ? 1u : 0u;
        byte |= (large | (bits >> 31 << 1)) << (2 * k);
      }
      to[i] = static_cast<uint8_t>(byte);
    }
  }
  static void get(float* __restrict__ to, const uint8_t* __restrict__ from, float low, float high) {
    for (size_t i = 0; i < kBlock / 4; ++i) {
      const uint32_t byte = from[i];
      for (size_t k = 0; k < 4; ++k) {
        const uint32_t code = byte >> (2 * k);
        to[4 * i + k] = from_bits(to_bits((code & 1u) != 0 ? high : low) ^ (code >> 1 << 31));
      }
    }
  }
};

// One bit per value: the sign. Every value is decoded to the block's mean magnitude.
struct Bits1 {
  static constexpr Codec kCodec = Codec::kBits1;
  static constexpr float kLow = 1, kCut = 1, kHigh = 1;
  static constexpr bool kWhole = F32::kWidth % 8 == 0;  // whether a vector has the values of whole bytes
  static constexpr float kMost = std::numeric_limits<float>::max();

  template <typename Vector = F32>
  static void put(uint8_t* __restrict__ to, const float* __restrict__ said, float) {
    if constexpr (kWhole) {
      for (size_t i = 0; i < kBlock; i += Vector::kWidth) {
        const uint32_t signs = Vector::load(said + i).signs();
        std::memcpy(to + i / 8, &signs, Vector::kWidth / 8);
      }
      return;
    }
    for (size_t i = 0; i < kBlock / 8; ++i) {
      uint32_t byte = 0;
      for (size_t k = 0; k < 8; ++k) byte |= to_bits(said[8 * i + k]) >> 31 << k;
      to[i] = static_cast<uint8_t>(byte);
    }
  }
  template <typename Vector = F32>
  static void get(float* __restrict__ to, const uint8_t* __restrict__ from, float low, float) {
    if constexpr (kWhole) {
      for (size_t i = 0; i < kBlock; i += Vector::kWidth) {
        uint32_t signs = 0;
        std::memcpy(&signs, from + i / 8, Vector::kWidth / 8);
        Vector::of_signs(signs, low).store(to + i);
      }
      return;
    }
    for (size_t i = 0; i < kBlock / 8; ++i) {
      const uint32_t byte = from[i];
      for (size_t k = 0; k < 8; ++k) to[8 * i + k] = from_bits(to_bits(low) ^ (byte >> k << 31));
    }
  }
};

template <typename Bits>
void encode_bits(void* wire, const float* __restrict__ values, float* __restrict__ lost) {
  uint8_t* to = static_cast<uint8_t*>(wire) + sizeof(float);
  const bool finite = greatest_bits(values) < kInfinityBits;
  float scale = finite ? mean_magnitude(values) : std::numeric_limits<float>::quiet_NaN();
  if (scale < 1e-30f) scale = 0;
  if (scale > Bits::kMost) scale = Bits::kMost;
  std::memcpy(wire, &scale, sizeof scale);
  if (!finite || scale == 0) {
    std::memset(to, 0, block_bytes(Bits::kCodec) - sizeof scale);
    for (size_t i = 0; i < kBlock; ++i) lost[i] = finite ? values[i] : scale;
    return;
  }
  const float low = scale * Bits::kLow, cut = scale * Bits::kCut, high = scale * Bits::kHigh;
  float said[kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = to_bits(__builtin_fabsf(values[i]) > cut ? high : low);
    said[i] = from_bits(magnitude | (to_bits(values[i]) & 0x80000000u));
  }
  Bits::put(to, said, high);
  for (size_t i = 0; i < kBlock; ++i) lost[i] = values[i] - said[i];
}

template <typename Bits>
void decode_bits(float* __restrict__ values, const void* wire, float weight, bool first) {
  float scale;
  std::memcpy(&scale, wire, sizeof scale);
  float said[kBlock];
  Bits::get(said, static_cast<const uint8_t*>(wire) + sizeof(float), scale * Bits::kLow * weight,
            scale * Bits::kHigh * weight);
  if (first) {
    std::memcpy(values, said, sizeof said);
  } else {
    for (size_t i = 0; i < kBlock; ++i) values[i] = values[i] + said[i];
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
