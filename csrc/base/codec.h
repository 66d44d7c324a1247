#pragma once

#include <cstddef>
#include <cstdint>

namespace dadt {

// The codecs, which encode values for sending in blocks of kBlock; the last block is filled up by repeating
// its values. The first two consist of 16-bit floats. In all others a block is one float32 scale followed by
// an integer for each value: from -127 to 127 in 8 bits, from -7 to 7 in 4 bits, a sign and one of two
// magnitudes in 2 bits, or a sign in 1 bit. The first value is in the lowest bits.
enum class Codec : uint32_t { kNone = 0, kBFloat16, kFloat16, kInt8, kInt4, kBits2, kBits1 };
inline constexpr int kCodecs = 7;
inline constexpr const char* kCodecNames[kCodecs] = {"none", "bf16",  "fp16", "int8",
                                                     "int4", "bits2", "bits1"};
inline constexpr size_t kBitsOfAValue[kCodecs] = {32, 16, 16, 8, 4, 2, 1};
inline const char* codec_name(Codec codec) { return kCodecNames[static_cast<int>(codec)]; }

inline constexpr size_t kBlock = 256;
inline size_t block_bytes(Codec codec) {
  const size_t scale = codec >= Codec::kInt8 ? sizeof(float) : 0;
  return scale + kBlock * kBitsOfAValue[static_cast<int>(codec)] / 8;
}
inline size_t block_count(size_t values) { return (values + kBlock - 1) / kBlock; }

// Returns the bytes that encode `values` values, without the padding of the last block.
inline size_t wire_bytes(Codec codec, size_t values) {
  const size_t padding = block_count(values) * kBlock - values;
  return block_count(values) * block_bytes(codec) - padding * kBitsOfAValue[static_cast<int>(codec)] / 8;
}

}  // namespace dadt
