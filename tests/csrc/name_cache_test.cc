#include "negotiation/name_cache.h"

#include <gtest/gtest.h>

#include <set>

namespace dadt::name_cache_test {
namespace {

std::shared_ptr<const Request> tensor(const std::string& name, size_t count = 3) {
  return std::make_shared<const Request>(
      Request{.name = name, .signature = {}, .group = {}, .counts = {count}});
}

using Ids = std::vector<uint64_t>;

class NameCaching : public testing::Test {
 protected:
  Ids trim(size_t capacity, const std::set<std::string>& pending = {}) {
    Decision trimmed;
    cache.trim(capacity, [&](const std::string& name) { return pending.contains(name); }, trimmed);
    EXPECT_TRUE(trimmed.admitted.empty());
    return trimmed.evicted;
  }

  NameCache cache;
  Decision decision;
};

TEST_F(NameCaching, ARequestIsFoundByItsIdAndTheIdByAnEqualRequest) {
  EXPECT_EQ(cache.id_of(*tensor("a")), 0u);
  EXPECT_EQ(cache.find(0), nullptr);
  EXPECT_EQ(cache.find(1), nullptr);
  const auto a = tensor("a");
  const uint64_t id = cache.admit(a, decision);
  EXPECT_NE(id, 0u);
  EXPECT_EQ(cache.find(id), a);
  EXPECT_EQ(cache.id_of(*tensor("a")), id);
  EXPECT_EQ(cache.id_of(*tensor("a", 4)), 0u);
  ASSERT_EQ(decision.admitted.size(), 1u);
  EXPECT_EQ(decision.admitted[0].id, id);
  EXPECT_EQ(decision.admitted[0].name, "a");
  EXPECT_TRUE(decision.evicted.empty());
}

TEST_F(NameCaching, AnotherRequestOfTheNameTakesItsPlaceUnderANewId) {
  const uint64_t old = cache.admit(tensor("a"), decision);
  const uint64_t id = cache.admit(tensor("a", 4), decision);
  EXPECT_GT(id, old);
  EXPECT_EQ(decision.evicted, (Ids{old}));
  EXPECT_EQ(cache.find(old), nullptr);
  EXPECT_EQ(cache.id_of(*tensor("a")), 0u);
  EXPECT_EQ(cache.id_of(*tensor("a", 4)), id);
  EXPECT_TRUE(trim(1).empty());
}

TEST_F(NameCaching, ThoseNotUsedForLongestGoFirst) {
  const uint64_t a = cache.admit(tensor("a"), decision);
  const uint64_t b = cache.admit(tensor("b"), decision);
  const uint64_t c = cache.admit(tensor("c"), decision);
  EXPECT_TRUE(trim(3).empty());
  cache.use(a);
  EXPECT_EQ(trim(1), (Ids{b, c}));
  EXPECT_EQ(cache.find(b), nullptr);
  EXPECT_EQ(cache.id_of(*tensor("a")), a);
  EXPECT_GT(cache.admit(tensor("b"), decision), c);
}

TEST_F(NameCaching, WhatIsPendingStaysThoughItIsTooMuch) {
  const uint64_t a = cache.admit(tensor("a"), decision);
  const uint64_t b = cache.admit(tensor("b"), decision);
  const uint64_t c = cache.admit(tensor("c"), decision);
  EXPECT_EQ(trim(1, {"a", "c"}), (Ids{b}));
  EXPECT_EQ(trim(0, {"a"}), (Ids{c}));
  EXPECT_EQ(trim(0), (Ids{a}));
}

}  // namespace
}  // namespace dadt::name_cache_test
