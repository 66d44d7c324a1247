// Connections over TCP that break while both ranks live, and are replaced.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "lasting_ranks.h"

namespace dadt::tcp_break_test {
namespace {

// Two ends whose connections break at any time, while memory that was sent changes as soon as it may.
class StreamBreak : public testing::TestWithParam<int> {};

TEST_P(StreamBreak, EveryByteComesOnce) {
  constexpr size_t kOperation = 200'000, kBytes = 10 * kOperation;
  const size_t sockets = static_cast<size_t>(GetParam());
  int replaced = 0;
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t limit) { return random() % limit; };
    std::vector<int> ones, others;
    for (size_t i = 0; i < sockets; ++i) {
      const auto [one, other] = pair();
      ones.push_back(one);
      others.push_back(other);
    }
    Stream from(1, ones), to(0, others);
    std::vector<uint8_t> want(kBytes), memory, got(kBytes);
    for (size_t i = 0; i < kBytes; i += sizeof(uint32_t)) {
      const uint32_t four = random();
      std::memcpy(want.data() + i, &four, sizeof four);
    }
    memory = want;
    size_t begun = 0, received = 0;  // where the operation begins
    while (received < kBytes) {
      const size_t sent = from.sent();
      if (sent < kOperation && begun < kBytes) {
        from.send({{memory.data() + begun + sent, std::min(kOperation - sent, 1 + below(200'000))}});
      } else if (begun < kBytes && received >= begun && from.flush()) {  // it has ended the one before
        const size_t lacks = from.unacknowledged();
        const char* end = reinterpret_cast<char*>(memory.data()) + begun + kOperation;
        from.settle(std::string(end - lacks, end));
        std::fill_n(memory.begin() + static_cast<ptrdiff_t>(begun), kOperation, 0);
        begun += kOperation;
      } else {
        from.flush();
      }
      if (below(2) == 0) {
        received += to.receive({{got.data() + received, std::min(kBytes - received, 1 + below(150'000))}});
      }
      // What then comes from the other side is answered by a reset.
      if (below(20) == 0) shutdown((below(2) == 0 ? ones : others)[below(sockets)], SHUT_RDWR);
      if (!from.has_ended() && !to.has_ended() && below(60) > 0) continue;
      if (below(3) > 0) continue;
      const uint64_t mine = from.detach(), theirs = to.detach();
      ASSERT_TRUE(from.can_resume(theirs));
      ASSERT_TRUE(to.can_resume(mine));
      for (size_t i = 0; i < sockets; ++i) {
        const auto [one, other] = pair();
        dup2(one, ones[i]);
        dup2(other, others[i]);
        close(one);
        close(other);
      }
      from.attach(theirs);
      to.attach(mine);
      ++replaced;
    }
    EXPECT_EQ(got, want) << "seed " << seed;
    for (int socket : ones) close(socket);
    for (int socket : others) close(socket);
  }
  EXPECT_GT(replaced, 12);
}

INSTANTIATE_TEST_SUITE_P(All, StreamBreak, testing::Values(1, 3));

using Floats = std::vector<std::vector<float>>;

// A thousand values again and again: copied, as a sanitizer looks at each that is computed.
void fill(std::vector<float>& values, int rank, int round) {
  constexpr size_t kPeriod = 1000;
  const size_t count = values.size();
  std::iota(values.begin(), values.begin() + static_cast<ptrdiff_t>(std::min(count, kPeriod)),
            static_cast<float>((rank + 1) * (round + 3)));
  for (size_t filled = kPeriod; filled < count; filled *= 2) {
    std::copy_n(values.begin(), std::min(filled, count - filled),
                values.begin() + static_cast<ptrdiff_t>(filled));
  }
}

// Every kind of operation, of few and of many values, in place and not, as they are and compressed. Returns
// all that comes of it.
std::vector<std::string> rounds(TcpExecutor& executor, int rank, int world_size, int group) {
  std::vector<std::string> found;
  const auto add = [&](const Floats& tensors) {
    for (const auto& each : tensors) {
      found.emplace_back(reinterpret_cast<const char*>(each.data()), each.size() * sizeof(float));
    }
  };
  for (int round = 0; round < 9; ++round) {
    const size_t count = round % 3 == 0 ? 1000 : round % 3 == 1 ? 50'000 : 400'000;
    Floats values(2, std::vector<float>(count / 2));
    for (int i = 0; i < 2; ++i) fill(values[i], rank, round + i);
    Floats sums = values;
    Operation operation = allreduce(DType::kFloat32, round % 2 == 0 ? sums : values, sums);
    operation.lane = std::string(static_cast<size_t>(round), 'x');
    std::vector<float> owed(count);
    if (round % 4 == 3) operation.compression = {.codec = Codec::kInt8, .owed = owed.data()};
    if (round % 8 == 6) operation.weight = rank + 1;
    if (group > 0) go_in_groups(executor.ways(), group, world_size);
    found.push_back(executor.run(operation, 30).lanes.back());
    add(sums);
    if (round % 6 == 5) operation.outputs[1] = nullptr;

    Operation sent = allreduce(DType::kFloat32, values, values);
    sent.kind = Kind::kBroadcast;
    sent.root = round % world_size;
    executor.run(sent, 30);
    add(values);

    Floats sends(world_size, std::vector<float>(1 + count / 4)), receives = sends;
    for (int to = 0; to < world_size; ++to) fill(sends[to], rank + to, round);
    Operation exchanged = allreduce(DType::kFloat32, sends, receives);
    exchanged.kind = Kind::kExchange;
    exchanged.layout = exchanged.receives =
        Layout(DType::kUInt8, std::vector<size_t>(world_size, sends[0].size() * sizeof(float)));
    executor.run(exchanged, 30);
    add(receives);

    for (const std::string& lane :
         executor.run(allgather(std::string(count / 100, 'a' + rank % 26)), 30).lanes) {
      found.push_back(lane);
    }
  }
  return found;
}

struct Case {
  int world_size;
  int streams;
  int group = 0;
};

class TcpBreak : public testing::TestWithParam<Case> {};

TEST_P(TcpBreak, OperationsGoOnWhereTheyWere) {
  const auto [world_size, streams, group] = GetParam();
  std::vector<std::vector<std::string>> want(world_size);
  {
    LastingRanks whole(world_size, streams);
    spawn(world_size, [&](int rank) { want[rank] = rounds(whole[rank], rank, world_size, group); });
    EXPECT_EQ(whole.replaced(), 0);
  }
  constexpr int kEnough = 8;
  LastingRanks ranks(world_size, streams);
  Cutter cutter(ranks, kEnough);
  try {
    spawn(world_size, [&](int rank) {
      try {
        bool goes_on = true;
        while (goes_on) {
          EXPECT_EQ(rounds(ranks[rank], rank, world_size, group), want[rank]);
          const std::string has_enough = ranks.replaced() < kEnough ? "" : "yes";
          goes_on = ranks[rank].run(allgather(has_enough, "enough"), 30).lanes[0].empty();
        }
      } catch (const Error& error) {
        ranks[rank].abort(error);
        throw;
      }
    });
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, TcpBreak,
    testing::ValuesIn(thinned<Case>({{2, 4}, {2, 1}, {4, 1}, {3, 3, true}, {4, 1, true}, {3, 3}})),
    [](const auto& each) {
      return std::to_string(each.param.world_size) + "Ranks" + std::to_string(each.param.streams) +
             "Streams" + (each.param.group > 0 ? "InGroupsOf" + std::to_string(each.param.group) : "");
    });

TEST(TcpBreak, ARankThatCannotBeReachedIsNamed) {
  const auto sockets = meshes(2, 1);
  TcpExecutor one(0, sockets[0], 30), other(1, sockets[1], 30);
  std::thread giving([&] {
    const auto rank = one.links()->await_break();
    ASSERT_TRUE(rank);
    one.links()->give_up(*rank);
  });
  shutdown(sockets[1][0][Links::kData], SHUT_RDWR);
  Floats tensors{{1, 2}};
  const Error error = caught([&] { one.run(allreduce(DType::kFloat32, tensors, tensors), 30); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
  giving.join();
}

TEST(TcpBreak, ARankThatEndsIsNotReplaced) {
  const auto sockets = meshes(2, 2);
  TcpExecutor one(0, sockets[0], 30), other(1, sockets[1], 30);
  std::thread waiting([&] { EXPECT_FALSE(one.links()->await_break()); });
  other.close();
  Floats tensors{{1, 2}};
  const Error error = caught([&] { one.run(allreduce(DType::kFloat32, tensors, tensors), 30); });
  EXPECT_NE(std::string(error.what()).find("rank 1 (127.0.0.1) has ended"), std::string::npos)
      << error.what();
  one.close();
  waiting.join();
}

}  // namespace
}  // namespace dadt::tcp_break_test
