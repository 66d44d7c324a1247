#pragma once

#include <cstddef>
#include <cstdint>

namespace dadt {

// How numbers travel: in blocks of kBlock values, the last one filled up with zeros. 16-bit floats, or whole
// numbers from -127 to 127 with one float32 scale for the block, before them.
enum class Codec : uint32_t { kNone = 0, kBFloat16, kFloat16, kInt8 };
inline constexpr int kCodecs = 4;
inline constexpr const char* kCodecNames[kCodecs] = {"none", "bf16", "fp16", "int8"};
inline const char* codec_name(Codec codec) { return kCodecNames[static_cast<int>(codec)]; }

inline constexpr size_t kBlock = 256;
inline constexpr size_t kBlockBytes[kCodecs] = {4 * kBlock, 2 * kBlock, 2 * kBlock, sizeof(float) + kBlock};

inline size_t block_bytes(Codec codec) { return kBlockBytes[static_cast<int>(codec)]; }
inline size_t block_count(size_t values) { return (values + kBlock - 1) / kBlock; }

// Bytes of so many values on the wire, without the padding of the last block.
inline size_t wire_bytes(Codec codec, size_t values) {
  const size_t width = codec == Codec::kInt8 ? 1 : 2;
  return block_count(values) * block_bytes(codec) - (block_count(values) * kBlock - values) * width;
}

}  // namespace dadt
