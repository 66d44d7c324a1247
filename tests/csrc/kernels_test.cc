#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/number.h"

namespace dadt::kernels_test {
namespace {

std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> found;
  for (const Kernels* table : {scalar_kernels(), avx2_kernels(), avx512_kernels(), neon_kernels()}) {
    if (table != nullptr) found.push_back(table);
  }
  return found;
}

const DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

const DType kIntegers[] = {DType::kInt64, DType::kInt32, DType::kInt16, DType::kInt8, DType::kUInt8};

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
      if (std::find(std::begin(kIntegers), std::end(kIntegers), dtype) != std::end(kIntegers)) {
        const uint64_t bits = random() * uint64_t{0x9e3779b97f4a7c15};
        std::memcpy(bytes_.data() + (i + shift) * item_, &bits, item_);
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

std::vector<std::pair<const char*, const Kernels::Fold*>> folds(const Kernels& table) {
  return {{"min", table.min}, {"max", table.max}, {"product", table.product}};
}

TEST(Kernels, AllTablesFoldToTheSameBits) {
  for (int d = 0; d < kDTypes; ++d) {
    const DType dtype = static_cast<DType>(d);
    for (size_t count : {0, 1, 63, 64, 65, 300, 5000}) {
      for (int ranks : {1, 2, 3, 5}) {
        std::vector<Numbers> inputs;
        std::vector<const void*> sources;
        for (int r = 0; r < ranks; ++r) inputs.emplace_back(dtype, count, r + 10, r % 3);
        for (auto& input : inputs) sources.push_back(input.data());
        for (size_t which = 0; which < 3; ++which) {
          Numbers want(dtype, count, 1);
          folds(*scalar_kernels())[which].second[d](want.data(), sources.data(), ranks, count, false);
          for (const Kernels* table : tables()) {
            for (bool stream : {false, true}) {
              Numbers got(dtype, count, 1);
              const auto [name, row] = folds(*table)[which];
              row[d](got.data(), sources.data(), ranks, count, stream);
              EXPECT_TRUE(got == want) << table->name << " " << name << " " << dtype_name(dtype) << " count "
                                       << count << " ranks " << ranks << " stream " << stream;
            }
          }
        }
      }
    }
  }
}

template <typename T>
void expect_folds(DType dtype, std::vector<std::vector<T>> sources, const std::vector<T>& least,
                  const std::vector<T>& greatest, const std::vector<T>& product) {
  const int d = static_cast<int>(dtype);
  for (const Kernels* table : tables()) {
    // Into memory of its own, and over the last of the sources: long enough for the vector loops.
    for (bool in_place : {false, true}) {
      const std::vector<T>* wants[] = {&least, &greatest, &product};
      for (int which = 0; which < 3; ++which) {
        std::vector<std::vector<T>> rows(sources.size()), want(1);
        for (int turn = 0; turn < 100; ++turn) {
          for (size_t r = 0; r < rows.size(); ++r) {
            rows[r].insert(rows[r].end(), sources[r].begin(), sources[r].end());
          }
          want[0].insert(want[0].end(), wants[which]->begin(), wants[which]->end());
        }
        std::vector<const void*> from;
        for (const auto& row : rows) from.push_back(row.data());
        std::vector<T> out(want[0].size());
        std::vector<T>& to = in_place ? rows.back() : out;
        const auto [name, row] = folds(*table)[which];
        row[d](to.data(), from.data(), static_cast<int>(from.size()), to.size(), false);
        EXPECT_EQ(std::memcmp(to.data(), want[0].data(), to.size() * sizeof(T)), 0)
            << table->name << " " << name << " " << dtype_name(dtype);
      }
    }
  }
}

TEST(Kernels, FoldsAreTheLeastTheGreatestAndTheProduct) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  expect_folds<float>(DType::kFloat32, {{1, 5, kNan, 2, kInf}, {3, -2, 1, kNan, 1}, {2, 3, 4, 4, -2}},
                      {1, -2, kNan, kNan, -2}, {3, 5, kNan, kNan, kInf}, {6, -30, kNan, kNan, -kInf});
  expect_folds<double>(DType::kFloat64, {{1, 5, kNan, 2}, {3, -2, 1, kNan}}, {1, -2, kNan, kNan},
                       {3, 5, kNan, kNan}, {3, -10, kNan, kNan});
  // 1, 2, NaN and 1.5, -2, 1
  expect_folds<uint16_t>(DType::kFloat16, {{0x3c00, 0x4000, 0x7e00}, {0x3e00, 0xc000, 0x3c00}},
                         {0x3c00, 0xc000, 0x7e00}, {0x3e00, 0x4000, 0x7e00}, {0x3e00, 0xc400, 0x7e00});
  expect_folds<uint16_t>(DType::kBFloat16, {{0x3f80, 0x4000, 0x7fc0}, {0x3fc0, 0xc000, 0x3f80}},
                         {0x3f80, 0xc000, 0x7fc0}, {0x3fc0, 0x4000, 0x7fc0}, {0x3fc0, 0xc080, 0x7fc0});
  expect_folds<int64_t>(DType::kInt64, {{int64_t{1} << 62, -3}, {4, 7}}, {4, -3}, {int64_t{1} << 62, 7},
                        {0, -21});
  expect_folds<int32_t>(DType::kInt32, {{1 << 30, -3}, {4, 7}}, {4, -3}, {1 << 30, 7}, {0, -21});
  expect_folds<int16_t>(DType::kInt16, {{300, -3}, {300, 7}}, {300, -3}, {300, 7}, {24464, -21});
  expect_folds<int8_t>(DType::kInt8, {{16, -3}, {17, 7}}, {16, -3}, {17, 7}, {16, -21});
  expect_folds<uint8_t>(DType::kUInt8, {{16, 200}, {17, 7}}, {16, 7}, {17, 200}, {16, 120});
}

TEST(Kernels, SumsOfIntegersWrap) {
  const std::vector<int8_t> a(3000, 100), b(3000, 100), c(3000, 3);
  const void* sources[] = {a.data(), b.data(), c.data()};
  std::vector<int8_t> out(3000);
  reduce(DType::kInt8, Reduction::kSum, out.data(), sources, nullptr, 3, 3, out.size(), false);
  EXPECT_EQ(out, std::vector<int8_t>(3000, -53));
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

TEST(Kernels, PredictGoesFromTheParameterByTheDisplacement) {
  for (DType dtype : kFloats) {
    const int d = static_cast<int>(dtype);
    for (const Kernels* table : tables()) {
      Numbers parameter(dtype, 100, 1), displacement(dtype, 100, 2), want(dtype, 100, 2);
      const Numbers before(dtype, 100, 1);
      scalar_kernels()->predict[d](parameter.data(), want.data(), 1.7, 100);
      table->predict[d](parameter.data(), displacement.data(), 1.7, 100);
      EXPECT_TRUE(displacement == want) << table->name << " " << dtype_name(dtype);
      EXPECT_FALSE(displacement == before) << table->name << " " << dtype_name(dtype);
      EXPECT_TRUE(parameter == before) << table->name << " " << dtype_name(dtype);
    }
  }
}

TEST(Kernels, PredictByMinusOneIsTheDifference) {
  const std::vector<float> parameter = {3, 5, 7};
  for (const Kernels* table : tables()) {
    std::vector<float> before = {1, 5, 9};
    table->predict[0](parameter.data(), before.data(), -1, 3);
    EXPECT_EQ(before, (std::vector<float>{2, 0, -2})) << table->name;
    for (DType dtype : kFloats) {
      Numbers p(dtype, 101, 1), got(dtype, 101, 2), want(dtype, 101, 2);
      table->predict[static_cast<int>(dtype)](p.data(), got.data(), -1, 101);
      scalar_kernels()->predict[static_cast<int>(dtype)](p.data(), want.data(), -1, 101);
      EXPECT_TRUE(got == want) << table->name << " " << dtype_name(dtype);
    }
  }
}

TEST(Kernels, ForeseeIsTheNextStep) {
  const NextStep step{-0.09, -0.1, 0, 0.999, 0.9, 0.5, 0.5, 1e-3};
  const NextStep decayed{-0.09, -0.1, 0.01, 0.999, 0.9, 0.1, 0.5, 1e-3};
  for (const Kernels* table : tables()) {
    std::vector<float> expected = {1, 0, -1};
    const std::vector<float> parameter = {2, 2, 2}, momentum = {3, 0, 1}, square = {4, 16, 1};
    table->foresee[0](parameter.data(), expected.data(), expected.data(), momentum.data(), square.data(),
                      step, 3, false);
    const double moves[] = {-0.37 / (std::sqrt(4.1) / 2 + 1e-3), 0, 0.01 / (std::sqrt(1.4) / 2 + 1e-3)};
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(expected[i], 2 * 0.999 + moves[i], 1e-6) << table->name;
    for (DType dtype : kFloats) {
      const int d = static_cast<int>(dtype);
      for (const bool divided : {false, true}) {
        Numbers p(dtype, 101, 1);
        Numbers e(dtype, 101, 2), want(dtype, 101, 2);
        Numbers m(dtype, 101, 3), v(dtype, 101, 4);
        const void* twice[] = {v.data(), v.data()};
        scalar_kernels()->product[d](v.data(), twice, 2, 101, false);
        const void* by = divided ? v.data() : nullptr;
        const void* moving = divided ? m.data() : nullptr;
        scalar_kernels()->foresee[d](p.data(), e.data(), want.data(), moving, by, decayed, 101, false);
        for (const bool stream : {false, true}) {
          Numbers got(dtype, 101, 5);
          table->foresee[d](p.data(), e.data(), got.data(), moving, by, decayed, 101, stream);
          EXPECT_TRUE(got == want) << table->name << " " << dtype_name(dtype);
        }
      }
    }
  }
}

TEST(Kernels, ConfineLeavesTheSecondMomentAtLeastTheSquareOfTheMomentum) {
  const MomentStep step{0.1, 0.95, 0.25, 1.5};
  for (const Kernels* table : tables()) {
    std::vector<float> square = {4, 0.01f, 0};
    const std::vector<float> momentum = {1, 2, 0}, gradient = {2, -1, 0};
    table->confine[0](square.data(), momentum.data(), gradient.data(), step, 3);
    const double after[] = {6, 1.7 * 1.7 * 0.25, 0};
    for (size_t i = 0; i < 3; ++i) {
      const double adams = 0.95 * square[i] + 0.05 * gradient[i] * gradient[i];
      EXPECT_NEAR(adams, after[i], 1e-6) << table->name;
    }
    for (DType dtype : kFloats) {
      const int d = static_cast<int>(dtype);
      Numbers v(dtype, 101, 1), want(dtype, 101, 1), m(dtype, 101, 2), g(dtype, 101, 3);
      const Numbers before(dtype, 101, 1);
      scalar_kernels()->confine[d](want.data(), m.data(), g.data(), step, 101);
      table->confine[d](v.data(), m.data(), g.data(), step, 101);
      EXPECT_TRUE(v == want) << table->name << " " << dtype_name(dtype);
      EXPECT_FALSE(v == before) << table->name << " " << dtype_name(dtype);
    }
  }
}

TEST(Kernels, ForeseeSumsWhatIsExpectedBlockByBlock) {
  const NextStep step{-0.09, -0.1, 0.01, 0.999, 0, 0, 0, 0};
  constexpr size_t kCount = 9001;  // blocks, and a part of one
  for (DType dtype : kFloats) {
    const int d = static_cast<int>(dtype);
    Numbers p(dtype, kCount, 1), one(dtype, kCount, 2), other(dtype, kCount, 3), m(dtype, kCount, 4);
    Numbers want(dtype, kCount, 5), got(dtype, kCount, 6);
    const void* sources[] = {one.data(), other.data()};
    const double weights[] = {0.75, -0.5};
    kernels().reduce[d](want.data(), sources, weights, 2, 1, kCount, false);
    kernels().foresee[d](p.data(), want.data(), want.data(), m.data(), nullptr, step, kCount, false);
    for (const bool stream : {false, true}) {
      foresee(dtype, p.data(), got.data(), m.data(), nullptr, step, {one.data(), other.data()}, {0.75, -0.5},
              kCount, stream);
      EXPECT_TRUE(got == want) << dtype_name(dtype);
    }
  }
}

// Also of values that are no numbers, too large for 16 bits, or too small for a scale.
TEST(Kernels, AllTablesCodeToTheSameBits) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int codec = 1; codec < kCodecs; ++codec) {
    const size_t bytes = block_bytes(static_cast<Codec>(codec));
    for (float scale : {1.f, 1e-38f, 1e5f, 1e38f}) {
      for (float special : {0.f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
        std::vector<float> values(kBlock), want(kBlock), sums(kBlock, 1.f);
        for (float& x : values) x = normal(random) * scale;
        values[0] = special;
        std::vector<uint8_t> wire(bytes);
        scalar_kernels()->encode[codec](wire.data(), values.data(), want.data());
        scalar_kernels()->decode[codec](sums.data(), wire.data(), 0.3f, false);
        for (const Kernels* table : tables()) {
          std::vector<float> lost(kBlock), added(kBlock, 1.f);
          std::vector<uint8_t> got(bytes);
          table->encode[codec](got.data(), values.data(), lost.data());
          table->decode[codec](added.data(), got.data(), 0.3f, false);
          EXPECT_EQ(std::memcmp(got.data(), wire.data(), bytes), 0) << table->name << " codec " << codec;
          for (size_t i = 0; i < kBlock; ++i) {  // a NaN is no other NaN
            ASSERT_TRUE(lost[i] == want[i] || (lost[i] != lost[i] && want[i] != want[i])) << table->name;
            ASSERT_TRUE(added[i] == sums[i] || (added[i] != added[i] && sums[i] != sums[i])) << table->name;
          }
          std::vector<float> owed(kBlock, 2.f);
          table->settle(owed.data(), lost.data(), 0.5f, kBlock);
          EXPECT_TRUE(std::all_of(owed.begin(), owed.end(), [](float x) { return std::isfinite(x); }));
          EXPECT_EQ(std::isfinite(added[0]), std::isfinite(special)) << table->name << " codec " << codec;
        }
      }
    }
  }
}

// 16 bits to float32, and back with one rounding: what is finite stays so, and what is not does.
TEST(Kernels, GatherAndScatterShortFloats) {
  const size_t count = kBlock - 3;  // a tail
  for (const Kernels* table : tables()) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const int d = static_cast<int>(dtype);
      const std::string name = std::string(table->name) + " " + dtype_name(dtype);
      Numbers from(dtype, count, 1);
      std::vector<float> owed(count, 0.25f), values(count), want(count);
      scalar_kernels()->gather[d](want.data(), from.data(), owed.data(), 2.f, count);
      table->gather[d](values.data(), from.data(), owed.data(), 2.f, count);
      EXPECT_EQ(values, want) << name;
      table->gather[d](values.data(), nullptr, owed.data(), 2.f, count);
      EXPECT_EQ(values, std::vector<float>(count, 0.5f)) << name;
      Numbers back(dtype, count, 2), one(dtype, count, 3), other(dtype, count, 3);
      table->gather[d](values.data(), from.data(), nullptr, 1.f, count);
      table->scatter[d](back.data(), values.data(), 1.f, count);
      EXPECT_TRUE(back == from) << name;
      for (float scale : {0.3f, 1e38f}) {
        for (float special : {1.f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
          values[7] = special;
          scalar_kernels()->scatter[d](one.data(), values.data(), scale, count);
          table->scatter[d](other.data(), values.data(), scale, count);
          EXPECT_TRUE(one == other) << name;
          table->gather[d](want.data(), other.data(), nullptr, 1.f, count);
          EXPECT_EQ(std::isfinite(want[7]), std::isfinite(special)) << name;
          const bool all = std::all_of(want.begin(), want.end(), [](float x) { return std::isfinite(x); });
          EXPECT_TRUE(all || !std::isfinite(special)) << name;
        }
      }
    }
  }
}

TEST(Kernels, CopiesEveryByte) {
  std::vector<uint8_t> from(3000), to(3000), want(3000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7);
  for (const Kernels* table : tables()) {
    for (size_t shift : {0, 1, 4, 20}) {
      for (size_t bytes : {0, 1, 3, 64, 1000, 2077, 2941}) {
        std::fill(want.begin(), want.end(), 0);
        std::memcpy(want.data() + shift, from.data() + 2 * shift, bytes);
        for (const bool stream : {false, true}) {
          std::fill(to.begin(), to.end(), 0);
          table->copy(to.data() + shift, from.data() + 2 * shift, bytes, stream);
          ASSERT_EQ(to, want) << table->name << " shift " << shift << " bytes " << bytes;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dadt::kernels_test
