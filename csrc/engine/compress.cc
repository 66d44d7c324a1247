#include "engine/compress.h"

#include <cstring>
#include <limits>

#include "kernels/kernels.h"

namespace dadt {
namespace {

constexpr int kFloat32 = static_cast<int>(DType::kFloat32);

void sum(Codec codec, const Wires& wires, size_t block, float* values) {
  const auto decode = kernels().decode[static_cast<int>(codec)];
  const size_t offset = block * block_bytes(codec);
  for (size_t i = 0; i < wires.addresses.size(); ++i) {
    const float weight = wires.weights.empty() ? 1.f : static_cast<float>(wires.weights[i]);
    decode(values, wires.addresses[i] + offset, weight, i == 0);
  }
}

}  // namespace

void compress(const Operation& operation, size_t begin, size_t end, void* wire) {
  const Kernels& table = kernels();
  const Layout& layout = operation.layout;
  const Compression& how = operation.compression;
  float* const owed = how.owed;
  const bool counts = operation.weight > 0;
  const float keep = static_cast<float>(how.keep);
  const auto gather = table.gather[static_cast<int>(layout.dtype())];
  const auto encode = table.encode[static_cast<int>(how.codec)];
  const size_t item = item_size(layout.dtype());
  uint8_t* to = static_cast<uint8_t*>(wire);
  float values[kBlock], lost[kBlock];
  for (size_t block = begin; block < end; ++block, to += block_bytes(how.codec)) {
    const size_t first = block * kBlock;
    const size_t count = std::min(kBlock, layout.total() - first);
    bool all_there = true;
    layout.pieces(first, first + count, [&](size_t tensor, size_t offset, size_t at, size_t some) {
      const uint8_t* from = static_cast<const uint8_t*>(operation.inputs[tensor]);
      all_there = all_there && from != nullptr;
      gather(values + at, from == nullptr ? nullptr : from + offset * item,
             counts && owed != nullptr && from != nullptr ? owed + first + at : nullptr, keep, some);
    });
    // A block that is not full repeats its values, which does not change their mean and maximum.
    for (size_t i = count; i < kBlock; ++i) values[i] = values[i - count];
    encode(to, values, lost);
    // With weight 0 the other ranks ignore these values, so the earlier residual remains. So does that of a
    // tensor for which this rank has no values: if no rank has any, the mean of what they send is not used.
    if (!counts) std::fill_n(lost, kBlock, std::numeric_limits<float>::quiet_NaN());
    if (owed != nullptr && !all_there) {
      layout.pieces(first, first + count, [&](size_t tensor, size_t, size_t at, size_t some) {
        if (operation.inputs[tensor] != nullptr) return;
        for (size_t i = at; i < at + some; ++i) lost[i] += owed[first + i] * keep;
      });
    }
    if (owed != nullptr) table.settle(owed + first, lost, keep, count);
  }
}

void decompress(const Operation& operation, size_t begin, size_t end, const Wires& wires) {
  const Layout& layout = operation.layout;
  const auto scatter = kernels().scatter[static_cast<int>(layout.dtype())];
  const float factor = static_cast<float>(1 / wires.divisor);
  const size_t item = item_size(layout.dtype());
  float values[kBlock];
  for (size_t block = begin; block < end; ++block) {
    sum(operation.compression.codec, wires, block - begin, values);
    const size_t first = block * kBlock;
    const size_t last = std::min(first + kBlock, layout.total());
    layout.pieces(first, last, [&](size_t tensor, size_t offset, size_t at, size_t count) {
      uint8_t* to = static_cast<uint8_t*>(operation.outputs[tensor]);
      if (to != nullptr) scatter(to + offset * item, values + at, factor, count);
    });
  }
}

void combine(Codec codec, const Wires& wires, size_t first, size_t total, size_t blocks, void* wire,
             float* owed, double share) {
  const Kernels& table = kernels();
  const auto encode = table.encode[static_cast<int>(codec)];
  const float factor = static_cast<float>(1 / wires.divisor);
  uint8_t* to = static_cast<uint8_t*>(wire);
  float sums[kBlock], values[kBlock], lost[kBlock];
  for (size_t block = 0; block < blocks; ++block, first += kBlock, to += block_bytes(codec)) {
    sum(codec, wires, block, sums);
    table.scatter[kFloat32](values, sums, factor, kBlock);
    encode(to, values, lost);
    if (owed == nullptr || first >= total) continue;
    const size_t count = std::min(kBlock, total - first);
    // Adds share * lost to the residual, except where the result would not be finite.
    table.gather[kFloat32](values, owed + first, lost, static_cast<float>(share), count);
    table.settle(owed + first, values, 1.f, count);
  }
}

}  // namespace dadt
