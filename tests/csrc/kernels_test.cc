#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/number.h"

namespace dadt {
namespace {

std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> found;
  for (const Kernels* table : {scalar_kernels(), avx2_kernels(), avx512_kernels(), neon_kernels()}) {
    if (table != nullptr) found.push_back(table);
  }
  return found;
}

const DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

// Numbers of a dtype, as bytes, at an address that only suits its elements.
class Numbers {
 public:
  Numbers(DType dtype, size_t count, unsigned seed, size_t shift = 1)
      : item_(item_size(dtype)), shift_(shift), bytes_((count + shift) * item_ + 64) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, 3);
    for (size_t i = 0; i < count; ++i) {
      const double x = normal(random);
      if (dtype == DType::kFloat32) put(i, static_cast<float>(x));
      if (dtype == DType::kFloat64) put(i, x);
      if (dtype == DType::kFloat16) {
        Half half;
        narrow(static_cast<float>(x), &half);
        put(i, half);
      }
      if (dtype == DType::kBFloat16) {
        BFloat bfloat;
        narrow(static_cast<float>(x), &bfloat);
        put(i, bfloat);
      }
    }
  }
  void* data() { return bytes_.data() + shift_ * item_; }
  bool operator==(const Numbers& other) const { return bytes_ == other.bytes_; }

 private:
  template <typename T>
  void put(size_t i, T x) {
    std::memcpy(bytes_.data() + (i + shift_) * item_, &x, sizeof x);
  }
  size_t item_, shift_;
  std::vector<uint8_t> bytes_;
};

TEST(Kernels, AllTablesGiveTheSameBits) {
  for (DType dtype : kFloats) {
    const int d = static_cast<int>(dtype);
    for (size_t count : {0, 1, 7, 63, 64, 65, 300, 1027}) {
      for (int ranks : {1, 2, 3, 5}) {
        for (bool weighted : {false, true}) {
          for (bool stream : {false, true}) {
            std::vector<Numbers> inputs;
            std::vector<const void*> sources;
            for (int r = 0; r < ranks; ++r) inputs.emplace_back(dtype, count, r + 10, r % 3);
            for (auto& input : inputs) sources.push_back(input.data());
            const double weights[] = {0.5, 3, 1, 7, 1.25};
            Numbers want(dtype, count, 1);
            scalar_kernels()->reduce[d](want.data(), sources.data(), weighted ? weights : nullptr, ranks, 3.0,
                                        count, false);
            for (const Kernels* table : tables()) {
              Numbers got(dtype, count, 1);
              table->reduce[d](got.data(), sources.data(), weighted ? weights : nullptr, ranks, 3.0, count,
                               stream);
              EXPECT_TRUE(got == want)
                  << table->name << " " << dtype_name(dtype) << " count " << count << " ranks " << ranks
                  << " weighted " << weighted << " stream " << stream;
            }
          }
        }
      }
    }
  }
}

TEST(Kernels, ReducesToTheMean) {
  const std::vector<float> a = {1, 2, 3}, b = {3, 6, -3};
  const void* sources[] = {a.data(), b.data()};
  const double weights[] = {3, 1};
  for (const Kernels* table : tables()) {
    std::vector<float> out(3);
    table->reduce[0](out.data(), sources, nullptr, 2, 2, 3, false);
    EXPECT_EQ(out, (std::vector<float>{2, 4, 0})) << table->name;
    table->reduce[0](out.data(), sources, weights, 2, 4, 3, false);
    EXPECT_EQ(out, (std::vector<float>{1.5, 3, 1.5})) << table->name;
  }
}

TEST(Kernels, IntegersAreExactAndTruncated) {
  const int64_t big = (int64_t{1} << 60) + 1;
  const std::vector<int64_t> a = {big, -7, 5}, b = {big, 0, 4};
  const void* sources[] = {a.data(), b.data()};
  std::vector<int64_t> out(3);
  kernels().reduce[static_cast<int>(DType::kInt64)](out.data(), sources, nullptr, 2, 2, 3, false);
  EXPECT_EQ(out, (std::vector<int64_t>{big, -3, 4}));
}

// Every 16-bit pattern survives there and back, in every table, and in rows long enough for the vector loops.
TEST(Kernels, HalvesSurviveWidening) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const int d = static_cast<int>(dtype);
    const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    const uint16_t quiet = dtype == DType::kFloat16 ? 0x0200 : 0x0040;
    for (const Kernels* table : tables()) {
      std::vector<uint16_t> out(all.size());
      const void* sources[] = {all.data()};
      table->reduce[d](out.data(), sources, nullptr, 1, 1, all.size(), false);
      for (size_t i = 0; i < all.size(); ++i) {
        const bool nan = (all[i] & 0x7fff) > infinity;
        ASSERT_EQ(out[i], nan ? all[i] | quiet : all[i])
            << table->name << " " << dtype_name(dtype) << " " << i;
      }
    }
  }
}

TEST(Kernels, HalvesAreRoundedToNearestEven) {
  const auto half = [](float x) {
    Half y;
    narrow(x, &y);
    return y.bits;
  };
  EXPECT_EQ(half(1 + 1 / 2048.f), 0x3c00);      // a tie goes to the even one below
  EXPECT_EQ(half(1 + 3 / 2048.f), 0x3c02);      // and above
  EXPECT_EQ(half(65519.f), 0x7bff);             // the largest that is not infinity
  EXPECT_EQ(half(65520.f), 0x7c00);             //
  EXPECT_EQ(half(std::ldexp(1.f, -25)), 0x0);   // half the smallest: a tie to zero
  EXPECT_EQ(half(std::ldexp(1.5f, -25)), 0x1);  //
  EXPECT_EQ(half(-0.f), 0x8000);
  BFloat y;
  narrow(1 + 1 / 256.f, &y);
  EXPECT_EQ(y.bits, 0x3f80);
  narrow(1 + 3 / 256.f, &y);
  EXPECT_EQ(y.bits, 0x3f82);
  narrow(std::numeric_limits<float>::max(), &y);
  EXPECT_EQ(y.bits, 0x7f80);
}

TEST(Kernels, SumsOfHalvesAreMadeInFloat32) {
  // 1 + 2^-11 + 2^-11: lost one by one in float16, kept in float32.
  Half one, small;
  narrow(1.f, &one);
  narrow(std::ldexp(1.f, -11), &small);
  const void* sources[] = {&one, &small, &small};
  for (const Kernels* table : tables()) {
    Half out;
    table->reduce[static_cast<int>(DType::kFloat16)](&out, sources, nullptr, 3, 1, 1, false);
    EXPECT_EQ(out.bits, 0x3c01) << table->name;
  }
}

TEST(Kernels, PredictIsUndoneExactly) {
  for (DType dtype : kFloats) {
    const int d = static_cast<int>(dtype);
    for (const Kernels* table : tables()) {
      Numbers parameter(dtype, 100, 1), displacement(dtype, 100, 2);
      Numbers want(dtype, 100, 1), moved(dtype, 100, 2);
      const Numbers before(dtype, 100, 1);
      scalar_kernels()->predict[d](want.data(), moved.data(), 1.7, 100);
      table->predict[d](parameter.data(), displacement.data(), 1.7, 100);
      EXPECT_TRUE(parameter == want && displacement == moved) << table->name << " " << dtype_name(dtype);
      EXPECT_TRUE(displacement == before) << table->name << " " << dtype_name(dtype);
      EXPECT_FALSE(parameter == before) << table->name << " " << dtype_name(dtype);
    }
  }
}

TEST(Kernels, DisplaceIsTheDifference) {
  const std::vector<float> parameter = {3, 5, 7};
  for (const Kernels* table : tables()) {
    std::vector<float> before = {1, 5, 9};
    table->displace[0](parameter.data(), before.data(), 3);
    EXPECT_EQ(before, (std::vector<float>{2, 0, -2})) << table->name;
    for (DType dtype : kFloats) {
      Numbers p(dtype, 101, 1), got(dtype, 101, 2), want(dtype, 101, 2);
      table->displace[static_cast<int>(dtype)](p.data(), got.data(), 101);
      scalar_kernels()->displace[static_cast<int>(dtype)](p.data(), want.data(), 101);
      EXPECT_TRUE(got == want) << table->name << " " << dtype_name(dtype);
    }
  }
}

TEST(Kernels, CopiesEveryByte) {
  std::vector<uint8_t> from(3000), to(3000), want(3000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7);
  for (const Kernels* table : tables()) {
    for (size_t shift : {0, 1, 4, 20}) {
      for (size_t bytes : {0, 1, 3, 64, 1000, 2077}) {
        std::fill(to.begin(), to.end(), 0);
        std::fill(want.begin(), want.end(), 0);
        std::memcpy(want.data() + shift, from.data() + 2 * shift, bytes);
        table->copy(to.data() + shift, from.data() + 2 * shift, bytes, true);
        ASSERT_EQ(to, want) << table->name << " shift " << shift << " bytes " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace dadt
