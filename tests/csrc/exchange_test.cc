// Bytes to and from each rank, of any lengths.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/null.h"
#include "ranks.h"

namespace dadt::exchange_test {
namespace {

constexpr size_t kSmallSlot = 256;  // the table alone takes several chunks

using Bytes = std::vector<uint8_t>;
using Length = std::function<size_t(int from, int to)>;

// Counts up. Beyond the first turn it is copied, as a sanitizer looks at each byte that is computed.
Bytes message(int from, int to, size_t length) {
  Bytes bytes(length);
  size_t filled = std::min(length, size_t{256});
  std::iota(bytes.begin(), bytes.begin() + filled, static_cast<uint8_t>(17 * from + 3 * to + 1));
  for (; filled < length; filled *= 2) {
    std::copy_n(bytes.begin(), std::min(filled, length - filled), bytes.begin() + filled);
  }
  return bytes;
}

// What one rank sends and receives, and the operation on it.
struct Mine {
  Mine(int rank, int world_size, const Length& length, bool allocate = false, std::string name = "test") {
    operation.kind = Kind::kExchange;
    operation.name = std::move(name);
    std::vector<size_t> sent, expected;
    for (int peer = 0; peer < world_size; ++peer) {
      sends.push_back(message(rank, peer, length(rank, peer)));
      wanted.push_back(message(peer, rank, length(peer, rank)));
      receives.emplace_back(length(peer, rank));
      sent.push_back(sends.back().size());
      expected.push_back(receives.back().size());
    }
    for (const Bytes& bytes : sends) operation.inputs.push_back(bytes.data());
    operation.layout = Layout(DType::kUInt8, sent);
    if (allocate) return;
    for (Bytes& bytes : receives) operation.outputs.push_back(bytes.data());
    operation.receives = Layout(DType::kUInt8, expected);
  }

  void take(const Result& result) {
    for (size_t rank = 0; rank < result.received.size(); ++rank) {
      const Buffer& buffer = result.received[rank];
      receives[rank].assign(buffer.data.get(), buffer.data.get() + buffer.bytes);
    }
  }

  std::vector<Bytes> sends, receives, wanted;
  Operation operation;
};

struct Case {
  int world_size;
  size_t slot_bytes;
  bool allocate;
};
class ShmExchange : public testing::TestWithParam<Case> {};

// Some of several chunks.
std::vector<Length> lengths(size_t slot) {
  return {
      [](int, int) { return 0; },
      [=](int, int) { return slot; },
      [=](int from, int to) { return (from * 7 + to * 3) % 5 * (slot / 2 - 1); },
      [=](int from, int) { return from == 1 ? 7 * slot + 1 : 0; },             // a scatter
      [=](int, int to) { return to == 0 ? 3 * slot - 1 : 0; },                 // a gather
      [=](int from, int to) { return from == to ? 9 * slot + 7 : from + 1; },  // its own is not in the stream
      [](int from, int to) { return from == 0 && to == 0 ? 100 : 0; },         //
      [=](int from, int to) {
        return from < to ? 1 + slot * (to - from) : 0;
      },  // streams end at different chunks
  };
}

TEST_P(ShmExchange, EverybodyGetsWhatIsSentToIt) {
  const auto [world_size, slot_bytes, allocate] = GetParam();
  const auto executors = connected(world_size, slot_bytes);
  for (const Length& length : lengths(slot_bytes)) {
    for (int turn = 0; turn < 2; ++turn) {
      spawn(world_size, [&](int rank) {
        Mine mine(rank, world_size, length, allocate);
        const Result result = executors[rank]->run(mine.operation, 30);
        EXPECT_TRUE(result.lanes.empty());
        EXPECT_EQ(result.received.size(), allocate ? static_cast<size_t>(world_size) : 0);
        mine.take(result);
        EXPECT_EQ(mine.receives, mine.wanted);
      });
    }
  }
}

// Many ranks exchange small slots alone: large ones differ in how they are copied, not in who reads them.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (bool allocate : {false, true}) {
    for (int world_size : {1, 2, 3, 4, 9}) all.push_back({world_size, kSmallSlot, allocate});
    for (int world_size : {1, 2, 3}) all.push_back({world_size, ShmExecutor::kSlotBytes, allocate});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, ShmExchange, testing::ValuesIn(thinned(cases())));

// An allgather: one piece for all. In place or not, and among three long enough to be written past the cache.
TEST(Exchange, WhatSeveralGetIsSentOnce) {
  for (int world_size : {1, 2, 3}) {
    const auto executors = connected(world_size, ShmExecutor::kSlotBytes);
    const size_t several = 3 * ShmExecutor::kSlotBytes + 1, long_of_three = size_t{6} << 20;
    for (size_t length : {size_t{0}, size_t{777}, world_size == 3 ? long_of_three : several}) {
      for (bool in_place : {false, true}) {
        spawn(world_size, [&](int rank) {
          Mine mine(rank, world_size, [&](int, int) { return length; });
          std::fill(mine.operation.inputs.begin(), mine.operation.inputs.end(),
                    in_place ? mine.receives[rank].data() : mine.sends[rank].data());
          mine.receives[rank] = mine.sends[rank];
          executors[rank]->run(mine.operation, 30);
          for (int peer = 0; peer < world_size; ++peer) {
            EXPECT_EQ(mine.receives[peer], message(peer, peer, length));
          }
        });
      }
    }
  }
}

// Some lengths are known to the receivers, some are not: that is each rank's own choice.
TEST(Exchange, RanksMayDifferInWhatTheyKnow) {
  const auto executors = connected(3, kSmallSlot);
  spawn(3, [&](int rank) {
    Mine mine(rank, 3, lengths(kSmallSlot)[2], rank == 1);
    mine.take(executors[rank]->run(mine.operation, 30));
    EXPECT_EQ(mine.receives, mine.wanted);
  });
}

TEST(Exchange, LengthsThatDifferAreNamedAlikeOnAllRanks) {
  for (int world_size : {2, 3, 9}) {
    for (size_t slot_bytes : {kSmallSlot, ShmExecutor::kSlotBytes}) {
      const auto executors = connected(world_size, slot_bytes);
      spawn(world_size, [&](int rank) {
        // Rank 1 expects 7 bytes from rank 0, which sends 8; all else agrees.
        Mine mine(rank, world_size,
                  [&](int from, int to) { return from == 0 && to == 1 && rank == 1 ? 7 : 8; });
        const Error error = caught([&] { executors[rank]->run(mine.operation, 30); });
        EXPECT_EQ(error.code(), Code::kMismatch);
        EXPECT_STREQ(error.what(), "exchange \"test\": rank 0 sends 8 bytes to rank 1, which expects 7");
      });
    }
  }
}

TEST(Exchange, ARankAloneIsHeldToItsOwnLengths) {
  Mine mine(0, 1, [](int, int) { return 5; });
  mine.operation.receives = Layout(DType::kUInt8, {4});
  ShmExecutor executor(0, 1, kSmallSlot);
  executor.connect({executor.endpoint()}, 1);
  const Error error = caught([&] { executor.run(mine.operation, 1); });
  EXPECT_EQ(error.code(), Code::kMismatch);
}

TEST(Exchange, ThroughTheEngine) {
  const auto executors = connected(2, kSmallSlot);
  spawn(2, [&](int rank) {
    Engine engine(executors[rank], rank, 2, 30);
    Mine known(rank, 2, lengths(kSmallSlot)[2]), unknown(rank, 2, lengths(kSmallSlot)[2], true);
    const auto one = engine.submit(known.operation), two = engine.submit(unknown.operation);
    ASSERT_TRUE(one->wait(deadline_after(30)) && two->wait(deadline_after(30)));
    unknown.take(two->result());
    EXPECT_EQ(known.receives, known.wanted);
    EXPECT_EQ(unknown.receives, known.wanted);
    Operation wrong = known.operation;
    wrong.inputs.pop_back();
    EXPECT_THROW(engine.submit(wrong), std::invalid_argument);
    engine.close(30);
  });
}

TEST(Exchange, NullGivesEachRankItsOwn) {
  NullExecutor executor(1, 3);
  Mine mine(1, 3, [](int, int) { return 10; });
  executor.run(mine.operation, 1);
  EXPECT_EQ(mine.receives, mine.sends);
}

}  // namespace
}  // namespace dadt::exchange_test
