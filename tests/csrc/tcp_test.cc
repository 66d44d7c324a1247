// DADT's own executor and messages over TCP, and what it makes of peers that die, are silent, or say what no
// rank says.
#include "tcp/tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <random>

#include "ranks.h"
#include "tcp/tcp_mailbox.h"

namespace dadt {
namespace {

// Two sockets that are connected over TCP.
std::pair<int, int> pair() {
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(server, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(server, 1), 0);
  EXPECT_EQ(getsockname(server, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(one, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int other = accept(server, nullptr, nullptr);
  close(server);
  return {one, other};
}

// For each rank, its sockets by rank.
std::vector<std::vector<int>> mesh(int world_size) {
  std::vector<std::vector<int>> sockets(world_size, std::vector<int>(world_size, -1));
  for (int rank = 0; rank < world_size; ++rank) {
    for (int other = 0; other < rank; ++other) {
      std::tie(sockets[rank][other], sockets[other][rank]) = pair();
    }
  }
  return sockets;
}

std::vector<std::shared_ptr<TcpExecutor>> over_tcp(int world_size) {
  const auto data = mesh(world_size);
  const auto notices = mesh(world_size);
  std::vector<std::shared_ptr<TcpExecutor>> executors;
  for (int rank = 0; rank < world_size; ++rank) {
    executors.push_back(std::make_shared<TcpExecutor>(rank, data[rank], notices[rank]));
  }
  return executors;
}

using Floats = std::vector<std::vector<float>>;

Floats random_floats(const std::vector<size_t>& counts, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  Floats tensors;
  for (size_t count : counts) {
    tensors.emplace_back(count);
    for (float& x : tensors.back()) x = normal(random);
  }
  return tensors;
}

const std::vector<std::vector<size_t>> kLayouts = {
    {}, {0}, {1}, {5, 0, 131, 1, 64}, {10'000, 1, 3}, {100'000, 7, 0, 150'001}};

struct Case {
  int world_size;
  bool in_place;
  bool weighted;
  Codec codec;
};

class TcpAllreduce : public testing::TestWithParam<Case> {};

// Shared memory has tests of its own; both add in the order of the ranks.
TEST_P(TcpAllreduce, GivesTheSameAsSharedMemory) {
  const auto [world_size, in_place, weighted, codec] = GetParam();
  const auto tcp = over_tcp(world_size);
  const auto shm = connected(world_size, ShmExecutor::kSlotBytes);
  for (const auto& counts : kLayouts) {
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    std::vector<Floats> results(world_size);
    spawn(world_size, [&](int rank) {
      Floats want = random_floats(counts, rank);
      Floats inputs = want, got = want;
      std::vector<float> owed(total, 0.25f), owes(total, 0.25f);
      Operation operation = allreduce(DType::kFloat32, want, want);
      operation.weight = weighted ? rank + 0.5 : 1;
      operation.lane = std::string(300, static_cast<char>('a' + rank));
      operation.compression = {codec, codec == Codec::kNone ? nullptr : owed.data(), 0.5};
      const Result first = shm[rank]->run(operation, 30);
      Operation again = allreduce(DType::kFloat32, in_place ? got : inputs, got);
      again.weight = operation.weight;
      again.lane = operation.lane;
      again.compression = {codec, codec == Codec::kNone ? nullptr : owes.data(), 0.5};
      const Result second = tcp[rank]->run(again, 30);
      EXPECT_EQ(first.lanes, second.lanes);
      EXPECT_EQ(first.weight_sum, second.weight_sum);
      if (codec == Codec::kNone) {
        EXPECT_EQ(got, want) << "rank " << rank;
      }
      float most = 0;  // sums of many values travel compressed, too
      for (size_t i = 0; i < counts.size(); ++i) {
        for (size_t k = 0; k < counts[i]; ++k) most = std::max(most, std::abs(got[i][k] - want[i][k]));
      }
      EXPECT_LT(most, 0.1f) << "rank " << rank;
      results[rank] = got;
    });
    for (const Floats& result : results) EXPECT_EQ(result, results[0]);
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int world_size : {2, 3, 5}) {
    for (bool both : {false, true}) all.push_back({world_size, both, both, Codec::kNone});
    for (Codec codec : {Codec::kBFloat16, Codec::kInt8}) all.push_back({world_size, true, false, codec});
    all.push_back({world_size, false, true, Codec::kFloat16});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, TcpAllreduce, testing::ValuesIn(cases()));

TEST(Tcp, AbsentInputsAreZerosAndAbsentOutputsUntouched) {
  for (size_t count : {100, 700'000}) {
    const auto executors = over_tcp(2);
    spawn(2, [&](int rank) {
      Floats tensors = {std::vector<float>(count, 8), std::vector<float>(count, 6)};
      Operation operation = allreduce(DType::kFloat32, tensors, tensors);
      if (rank == 0) operation.inputs[0] = nullptr;
      if (rank == 1) operation.outputs[1] = nullptr;
      executors[rank]->run(operation, 30);
      EXPECT_EQ(tensors[0], std::vector<float>(count, 4));
      EXPECT_EQ(tensors[1], std::vector<float>(count, 6));
    });
  }
}

TEST(Tcp, BroadcastsGoRound) {
  for (int world_size : {2, 4}) {
    const auto executors = over_tcp(world_size);
    for (int root = 0; root < world_size; ++root) {
      spawn(world_size, [&](int rank) {
        for (size_t count : {3, 200'000}) {
          Floats tensors = random_floats({count, 17}, rank);
          Operation operation = allreduce(DType::kFloat32, tensors, tensors);
          operation.kind = Kind::kBroadcast;
          operation.root = root;
          executors[rank]->run(operation, 30);
          EXPECT_EQ(tensors, random_floats({count, 17}, root));
        }
      });
    }
  }
}

TEST(Tcp, GathersBytesOfAnyLength) {
  const auto executors = over_tcp(3);
  spawn(3, [&](int rank) {
    const Result result =
        executors[rank]->run(allgather(std::string(static_cast<size_t>(rank) * 2'500'000, 'x')), 30);
    for (size_t peer = 0; peer < 3; ++peer) EXPECT_EQ(result.lanes[peer], std::string(peer * 2'500'000, 'x'));
  });
}

TEST(Tcp, OperationsMayFollowAtOnceAndRanksMayLeaveAfterTheLast) {
  for (int turn = 0; turn < 5; ++turn) {
    auto executors = over_tcp(3);
    spawn(3, [&](int rank) {
      for (size_t i = 0; i < 20; ++i) {
        Floats tensors = {std::vector<float>(i * i * 211, static_cast<float>(rank))};
        executors[rank]->run(allreduce(DType::kFloat32, tensors, tensors), 30);
        EXPECT_EQ(tensors[0], std::vector<float>(i * i * 211, 1));
      }
      executors[rank]->close();
      executors[rank].reset();
    });
  }
}

// Failures --------------------------------------------------------------------------------------------------

TEST(Tcp, RanksThatDoNotAgreeSayTheSame) {
  const auto executors = over_tcp(3);
  std::vector<std::string> said(3);
  spawn(3, [&](int rank) {
    Floats tensors = {std::vector<float>(rank == 1 ? 5 : 400'000)};
    said[rank] =
        caught([&] { executors[rank]->run(allreduce(DType::kFloat32, tensors, tensors), 30); }).what();
    executors[rank]->abort(Error(Code::kMismatch, said[rank]));
  });
  EXPECT_EQ(said[0],
            "rank 0 is in allreduce \"test\" of 400000 float32, rank 1 in allreduce \"test\" of 5 float32: "
            "the ranks do "
            "not run the same steps");
  EXPECT_EQ(said[1], said[0]);
  EXPECT_EQ(said[2], said[0]);
}

TEST(Tcp, APeerThatIsGoneIsNamed) {
  const auto data = mesh(2);
  const auto notices = mesh(2);
  TcpExecutor mine(0, data[0], notices[0]);
  close(data[1][0]);
  close(notices[1][0]);
  const Error error = caught([&] { mine.run(allgather("x", "end"), 30); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_STREQ(error.what(), "rank 1 (127.0.0.1) is gone; waited for it in allgather \"end\"");
}

TEST(Tcp, ARankThatHasEndedIsNamed) {
  const auto executors = over_tcp(2);
  executors[1]->close();
  const Error error = caught([&] { executors[0]->run(allgather("x", "end"), 30); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_STREQ(error.what(), "rank 1 (127.0.0.1) has ended; waited for it in allgather \"end\"");
}

TEST(Tcp, ASilentRankIsNamedAfterTheTimeout) {
  const auto executors = over_tcp(3);
  std::thread second([&] {
    const Error error = caught([&] { executors[2]->run(allgather("x", "end"), 0.2); });
    EXPECT_EQ(error.code(), Code::kTimeout);
  });
  const Error error = caught([&] { executors[0]->run(allgather("x", "end"), 0.2); });
  second.join();
  EXPECT_STREQ(error.what(), "rank 1 did not come to allgather \"end\" within 0.2 s");
}

TEST(Tcp, AnAbortWakesThoseWhoWait) {
  for (int aborter : {0, 2}) {
    const auto executors = over_tcp(3);
    std::vector<std::thread> waiters;
    for (int rank : {0, 1}) {
      waiters.emplace_back([&, rank] {
        Floats tensors = {std::vector<float>(500'000)};
        const Operation operation = allreduce(DType::kFloat32, tensors, tensors);
        const Error error = caught([&] { executors[rank]->run(operation, 600); });
        EXPECT_EQ(error.code(), Code::kAborted);
        EXPECT_STREQ(error.what(), rank == aborter
                                       ? "stop"
                                       : ("rank " + std::to_string(aborter) + " gave up: stop").c_str());
      });
    }
    executors[aborter]->abort(Error(Code::kAborted, "stop"));
    for (auto& waiter : waiters) waiter.join();
  }
}

// Someone who has proved that it is a rank, and then says what no rank would say.
class TcpRubbish : public testing::TestWithParam<int> {};

TEST_P(TcpRubbish, IsToldAndTakesNoMemory) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto data = mesh(2);
  const auto notices = mesh(2);
  TcpExecutor mine(0, data[0], notices[0]);
  Floats tensors = {std::vector<float>(1000)};
  const bool exchanges = random() % 2 == 0;
  Operation operation = allreduce(DType::kFloat32, tensors, tensors);
  if (exchanges) {
    operation = {.kind = Kind::kExchange,
                 .layout = Layout(DType::kUInt8, {4000, 4000}),
                 .inputs = {tensors[0].data(), tensors[0].data()}};
  }
  Head head = head_of(operation, operation.layout.total(), exchanges ? 32 : 0);
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  for (int left = 1 + static_cast<int>(random() % 3); left > 0; --left) {
    bytes[random() % 64] = static_cast<char>(random());
  }
  bytes.append(random() % 64, static_cast<char>(random()));
  ASSERT_EQ(send(data[1][0], bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  if (random() % 4 == 0) {
    ASSERT_GT(send(notices[1][0], bytes.data(), 12, MSG_NOSIGNAL), 0);
  }
  close(data[1][0]);
  close(notices[1][0]);
  const Error error = caught([&] { mine.run(operation, 30); });
  EXPECT_NE(error.code(), Code::kInternal) << error.what();
}
INSTANTIATE_TEST_SUITE_P(Seeds, TcpRubbish, testing::Range(0, 300));

// Messages
// ----------------------------------------------------------------------------------------------------

std::vector<std::unique_ptr<TcpMailbox>> mailboxes(int world_size) {
  const auto sockets = mesh(world_size);
  std::vector<std::unique_ptr<TcpMailbox>> boxes;
  for (int rank = 0; rank < world_size; ++rank)
    boxes.push_back(std::make_unique<TcpMailbox>(rank, sockets[rank]));
  return boxes;
}

void expect_good(const std::shared_ptr<Transit>& transit) {
  ASSERT_TRUE(transit->wait(deadline_after(60))) << transit->title() << " is not done";
  EXPECT_FALSE(transit->error()) << transit->error()->what();
}

TEST(TcpMail, EveryRankToEveryRank) {
  const auto boxes = mailboxes(3);
  spawn(3, [&](int rank) {
    std::vector<std::vector<uint8_t>> memory;
    std::vector<std::shared_ptr<Transit>> transits;
    memory.reserve(200);
    for (int64_t tag = 0; tag < 12; ++tag) {
      const size_t bytes = static_cast<size_t>(tag) * static_cast<size_t>(tag) * 3'001;
      for (int peer = 0; peer < 3; ++peer) {
        memory.emplace_back(bytes, static_cast<uint8_t>(rank + tag));
        transits.push_back(boxes[rank]->send(memory.back().data(), bytes, peer, tag));
      }
    }
    for (int64_t tag = 11; tag >= 0; --tag) {
      const size_t bytes = static_cast<size_t>(tag) * static_cast<size_t>(tag) * 3'001;
      for (int peer = 0; peer < 3; ++peer) {
        std::vector<uint8_t> got(bytes);
        expect_good(boxes[rank]->receive(got.data(), bytes, peer, tag));
        EXPECT_EQ(got, std::vector<uint8_t>(bytes, static_cast<uint8_t>(peer + tag)));
      }
    }
    for (const auto& transit : transits) expect_good(transit);
  });
}

TEST(TcpMail, WhatWasSentArrivesThoughItsSenderHasClosed) {
  const auto boxes = mailboxes(2);
  const std::vector<uint8_t> sent(30'000, 7);
  for (int64_t tag = 0; tag < 5; ++tag) expect_good(boxes[0]->send(sent.data(), sent.size(), 1, tag));
  boxes[0]->close();
  for (int64_t tag = 0; tag < 5; ++tag) {
    std::vector<uint8_t> got(sent.size());
    expect_good(boxes[1]->receive(got.data(), got.size(), 0, tag));
    EXPECT_EQ(got, sent);
  }
  uint8_t byte = 0;
  const auto late = boxes[1]->receive(&byte, 1, 0, 9);
  ASSERT_TRUE(late->wait(deadline_after(60)));
  EXPECT_STREQ(late->error()->what(), "rank 0 (127.0.0.1) has ended; waited for it in a receive with tag 9");
}

TEST(TcpMail, AnAbortFailsAllHereAndThere) {
  const auto boxes = mailboxes(2);
  uint8_t bytes[2];
  const auto here = boxes[0]->receive(bytes, 1, 1, 0);
  const auto there = boxes[1]->receive(bytes + 1, 1, 0, 0);
  boxes[0]->abort(Error(Code::kAborted, "stop"));
  ASSERT_TRUE(here->wait(deadline_after(60)) && there->wait(deadline_after(60)));
  EXPECT_STREQ(here->error()->what(), "stop");
  EXPECT_STREQ(there->error()->what(), "rank 0 gave up: stop");
}

class TcpMailRubbish : public testing::TestWithParam<int> {};

TEST_P(TcpMailRubbish, FailsWhatWaits) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto sockets = mesh(2);
  TcpMailbox mine(0, sockets[0]);
  std::vector<uint8_t> memory(4000);
  const auto receive = mine.receive(memory.data(), memory.size(), 1, 3);
  std::string bytes(48 + random() % 200, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() % 3 == 0 ? random() : 0);
  ASSERT_GT(send(sockets[1][0], bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  close(sockets[1][0]);
  ASSERT_TRUE(receive->wait(deadline_after(60)));
  EXPECT_TRUE(receive->error());
}
INSTANTIATE_TEST_SUITE_P(Seeds, TcpMailRubbish, testing::Range(0, 300));

}  // namespace
}  // namespace dadt
