#include "base/layout.h"

#include <gtest/gtest.h>

namespace dadt::layout_test {
namespace {

TEST(Layout, PiecesCoverEveryElementOnce) {
  const Layout layout(DType::kFloat32, {3, 0, 5, 1, 0, 7});
  ASSERT_EQ(layout.total(), 16u);
  const std::vector<size_t> firsts = {0, 3, 3, 8, 9, 9};
  for (size_t begin = 0; begin <= 16; ++begin) {
    for (size_t end = begin; end <= 16; ++end) {
      size_t next = begin;
      layout.pieces(begin, end, [&](size_t tensor, size_t offset, size_t at, size_t count) {
        EXPECT_EQ(firsts[tensor] + offset, next);
        EXPECT_EQ(at, next - begin);
        EXPECT_LE(offset + count, layout.counts()[tensor]);
        next += count;
      });
      EXPECT_EQ(next, end);
    }
  }
}

TEST(Layout, TellsDivisionsApart) {
  EXPECT_EQ(Layout(DType::kInt8, {1, 2}).hash(), Layout(DType::kInt8, {1, 2}).hash());
  EXPECT_NE(Layout(DType::kInt8, {1, 2}).hash(), Layout(DType::kInt8, {2, 1}).hash());
  EXPECT_NE(Layout(DType::kInt8, {3}).hash(), Layout(DType::kInt8, {3, 0}).hash());
}

TEST(Layout, EmptyHasNoBytes) { EXPECT_EQ(Layout(DType::kFloat64, {}).bytes(), 0u); }

}  // namespace
}  // namespace dadt::layout_test
