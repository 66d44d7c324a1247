#include "negotiation/coordinator.h"

#include <gtest/gtest.h>

#include <optional>

namespace dadt::coordinator_test {
namespace {

using std::chrono::seconds;

Request tensor(const std::string& name, size_t count = 3, uint64_t group_size = 2) {
  Request request;
  request.name = name;
  request.signature = "[" + std::to_string(count) + "]";
  request.group = group_size > 0 ? "g" : "";
  request.group_size = group_size;
  request.dtype = DType::kFloat32;
  request.counts = {count};
  return request;
}

Report report(std::vector<Request> requests) {
  Report report;
  report.requests = std::move(requests);
  return report;
}

Report joined() {
  Report report;
  report.joined = true;
  return report;
}

using Ranks = std::vector<int>;
using Failed = std::vector<std::pair<std::string, Ranks>>;

// What has failed, and on which ranks.
Failed failed(const Decision& decision) {
  Failed failed;
  for (const auto& failure : decision.failures) failed.emplace_back(failure.name, failure.ranks);
  std::sort(failed.begin(), failed.end());
  return failed;
}

class Groups : public testing::Test {
 protected:
  void take(int rank, const Report& report) { coordinator.take(rank, report, now); }
  Decision decide() { return coordinator.decide(now).value_or(Decision{}); }

  Coordinator::Time now = Clock::now();
  Coordinator coordinator{2, {}};
};

TEST_F(Groups, AFullOneRunsThoughTheNextFails) {
  take(0, report({tensor("a"), tensor("b"), tensor("c"), tensor("d")}));
  take(1, report({tensor("a"), tensor("b"), tensor("c", 4), tensor("d")}));
  const Decision decision = decide();
  ASSERT_EQ(decision.batches.size(), 1u);
  EXPECT_EQ(decision.batches[0].ids.size(), 2u);
  EXPECT_EQ(failed(decision), (Failed{{"c", {0, 1}}, {"d", {0}}, {"d", {1}}}));
}

TEST_F(Groups, MayBeTriedAgainBeforeOthersHaveSubmittedAllOfTheOneThatFailed) {
  for (int turn = 0; turn < 3; ++turn) {
    take(0, report({tensor("a"), tensor("b")}));
    take(1, report({tensor("a", 4)}));
    EXPECT_EQ(failed(decide()), (Failed{{"a", {0, 1}}, {"b", {0}}}));
    take(0, report({tensor("a"), tensor("b")}));
    EXPECT_TRUE(decide().failures.empty());
    take(1, report({tensor("b")}));
    EXPECT_EQ(failed(decide()), (Failed{{"b", {1}}}));
    take(1, report({tensor("a"), tensor("b")}));
    const Decision decision = decide();
    EXPECT_TRUE(decision.failures.empty());
    ASSERT_EQ(decision.batches.size(), 1u);
    EXPECT_EQ(decision.batches[0].ids.size(), 2u);
  }
}

TEST_F(Groups, MayBeTriedAgainAfterARankWasInNone) {
  take(0, report({tensor("a"), tensor("b")}));
  take(1, report({tensor("a", 3, 0)}));
  EXPECT_EQ(failed(decide()), (Failed{{"a", {0, 1}}, {"b", {0}}}));
  for (int rank : {0, 1}) take(rank, report({tensor("a"), tensor("b")}));
  EXPECT_EQ(decide().batches.size(), 1u);
}

TEST_F(Groups, EachTensorFailsOnARankThatHasItInNone) {
  for (int turn = 0; turn < 2; ++turn) {
    take(0, report({tensor("a"), tensor("b")}));
    take(1, report({tensor("a", 3, 0)}));
    EXPECT_EQ(failed(decide()), (Failed{{"a", {0, 1}}, {"b", {0}}}));
    EXPECT_TRUE(coordinator.owes());
    take(1, report({tensor("b", 3, 0)}));
    EXPECT_EQ(failed(decide()), (Failed{{"b", {1}}}));
    EXPECT_FALSE(coordinator.owes());
    take(1, report({tensor("a", 3, 0), tensor("b", 3, 0)}));
    take(0, report({tensor("a")}));
    EXPECT_EQ(failed(decide()), (Failed{{"a", {0, 1}}}));
    take(0, report({tensor("b")}));
    EXPECT_EQ(failed(decide()), (Failed{{"b", {0, 1}}}));
    EXPECT_FALSE(coordinator.owes());
    for (int rank : {0, 1}) take(rank, report({tensor("a"), tensor("b")}));
    EXPECT_EQ(decide().batches.size(), 1u);
  }
}

TEST_F(Groups, EachTensorFailsOnARankThatHasItInAnother) {
  Request other = tensor("b");
  other.group = "h";
  take(0, report({tensor("a"), tensor("b")}));
  take(1, report({tensor("a", 4)}));
  EXPECT_EQ(failed(decide()), (Failed{{"a", {0, 1}}, {"b", {0}}}));
  take(1, report({other}));
  Request last = tensor("c");
  last.group = "h";
  take(1, report({last}));
  EXPECT_EQ(failed(decide()), (Failed{{"b", {1}}, {"c", {1}}}));
}

TEST_F(Groups, TheSameTensorsMakeThemUpOnAllRanks) {
  take(0, report({tensor("a"), tensor("b"), tensor("c"), tensor("d")}));
  take(1, report({tensor("a"), tensor("c"), tensor("b"), tensor("d")}));
  const Decision decision = decide();
  EXPECT_TRUE(decision.batches.empty());
  ASSERT_EQ(failed(decision),
            (Failed{{"a", {0, 1}}, {"b", {0}}, {"b", {1}}, {"c", {0, 1}}, {"d", {0}}, {"d", {1}}}));
  EXPECT_EQ(decision.failures[0].text,
            "\"c\": rank 0 and rank 1 have it in different rounds of group \"g\": the same tensors must make "
            "up the group on all ranks");
  for (int rank : {0, 1}) take(rank, report({tensor("a"), tensor("b")}));
  EXPECT_EQ(decide().batches.size(), 1u);
}

TEST_F(Groups, OneThatAllRanksLackAMemberOfIsToldOf) {
  for (int rank : {0, 1}) take(rank, report({tensor("a", 3, 3), tensor("b", 3, 3)}));
  EXPECT_FALSE(coordinator.decide(now));
  EXPECT_TRUE(coordinator.stalls(now + seconds(59)).empty());
  const auto stalls = coordinator.stalls(now + seconds(61));
  ASSERT_EQ(stalls.size(), 2u);
  EXPECT_EQ(stalls[0].name, "a");
  EXPECT_EQ(stalls[0].submitted, (Ranks{0, 1}));
  EXPECT_EQ(stalls[0].group, "g");
  EXPECT_EQ(stalls[0].group_has, 2u);
  EXPECT_EQ(stalls[0].group_size, 3u);
  EXPECT_TRUE(coordinator.stalls(now + seconds(120)).empty());
  EXPECT_EQ(coordinator.stalls(now + seconds(182)).size(), 2u);
}

TEST_F(Groups, OneThatIsNeverWholeFailsOnceAllHaveJoined) {
  for (int rank : {0, 1}) take(rank, report({tensor("a")}));
  for (int rank : {0, 1}) take(rank, joined());
  const Decision decision = decide();
  EXPECT_EQ(decision.last_joined, 1);
  ASSERT_EQ(failed(decision), (Failed{{"a", {0, 1}}}));
  EXPECT_EQ(decision.failures[0].text,
            "\"a\": its group \"g\" has 1 of 2 members, and all ranks have joined");
  for (int rank : {0, 1}) take(rank, report({tensor("a"), tensor("b")}));
  EXPECT_EQ(decide().batches.size(), 1u);
}

TEST(Joined, CountsOnceWhatWasSubmittedBeforeIsUnderstood) {
  NegotiationOptions options;
  options.cycle = 0;
  options.cache_capacity = 1;
  const auto now = Clock::now();
  Coordinator coordinator(2, options);
  const auto take = [&](int rank, const Report& report) { coordinator.take(rank, report, now); };
  const auto batches = [&] { return coordinator.decide(now).value_or(Decision{}).batches; };
  for (int rank : {0, 1}) take(rank, report({tensor("y", 3, 0)}));
  const auto first = batches();
  ASSERT_EQ(first.size(), 1u);
  for (int rank : {0, 1}) take(rank, report({tensor("z", 3, 0)}));
  ASSERT_EQ(batches().size(), 1u);  // the id of y means nothing any more, which rank 1 has not heard yet
  Report last = joined();
  last.ids = first[0].ids;
  take(1, last);
  take(0, report({tensor("y", 3, 0)}));
  EXPECT_TRUE(batches().empty());
  last = joined();
  last.requests = {tensor("y", 3, 0)};
  take(1, last);
  const auto both = batches();
  ASSERT_EQ(both.size(), 1u);
  EXPECT_TRUE(both[0].missing.empty());
}

TEST(Joined, ThatNobodyFollowsIsToldOf) {
  const auto now = Clock::now();
  Coordinator coordinator(3, {});
  coordinator.take(0, joined(), now);
  // A rank that still trains is no stall.
  coordinator.take(1, report({tensor("x", 3, 0)}), now + seconds(50));
  coordinator.take(2, report({tensor("x", 3, 0)}), now + seconds(50));
  EXPECT_TRUE(coordinator.decide(now + seconds(51)));
  EXPECT_TRUE(coordinator.stalls(now + seconds(100)).empty());
  const auto stalls = coordinator.stalls(now + seconds(111));
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0].name, "join");
  EXPECT_EQ(stalls[0].submitted, (Ranks{0}));
  EXPECT_EQ(stalls[0].missing, (Ranks{1, 2}));
  EXPECT_EQ(stalls[0].seconds, 111);
  for (int rank : {1, 2}) coordinator.take(rank, joined(), now + seconds(112));
  EXPECT_TRUE(coordinator.decide(now + seconds(112)));
  EXPECT_TRUE(coordinator.stalls(now + seconds(9999)).empty());
}

TEST(Messages, OfADecisionSayWhoseTensorsHaveFailed) {
  Decision decision;
  decision.failures.push_back({Code::kMismatch, "a", "they differ", {0, 3}});
  const std::string message = encode(decision);
  const Decision read = decode_decision(message.substr(sizeof(uint32_t) + 1));
  EXPECT_EQ(failed(read), (Failed{{"a", {0, 3}}}));
  EXPECT_EQ(read.failures[0].text, "they differ");
}

}  // namespace
}  // namespace dadt::coordinator_test
