// DADT's own executor over TCP, and what it makes of peers that die, are silent, or say what no rank says.
#include "tcp/tcp.h"

#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <random>

#include "ranks.h"
#include "tcp_pairs.h"

namespace dadt::tcp_test {
namespace {

std::vector<std::shared_ptr<TcpExecutor>> over_tcp(int world_size, int streams = 1) {
  const auto sockets = meshes(world_size, streams);
  std::vector<std::shared_ptr<TcpExecutor>> executors;
  for (int rank = 0; rank < world_size; ++rank) {
    executors.push_back(std::make_shared<TcpExecutor>(rank, sockets[rank]));
  }
  return executors;
}

using Floats = std::vector<std::vector<float>>;

Floats random_floats(const std::vector<size_t>& counts, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  Floats tensors;
  for (size_t count : counts) {
    std::vector<float>& tensor = tensors.emplace_back(count);
    size_t filled = std::min(
        count, size_t{4099});  // a prime: what is copied to another place is not what should be there
    std::generate_n(tensor.begin(), filled, [&] { return normal(random); });
    for (; filled < count; filled *= 2) {
      std::copy_n(tensor.begin(), std::min(filled, count - filled), tensor.begin() + filled);
    }
  }
  return tensors;
}

const std::vector<std::vector<size_t>> kLayouts = {
    {}, {0}, {1}, {5, 0, 131, 1, 64}, {10'000, 1, 3}, {100'000, 7, 0, 150'001}};

const std::vector<std::vector<size_t>> kLargeLayouts = {{262'144}, {300'000, 7, 0, 150'001}, {1, 700'003}};

struct Case {
  int world_size;
  bool in_place;
  bool weighted;
  Codec codec;
  int streams = 1;
  int group = 0;  // number of ranks in a group; 0 for all
};

class TcpAllreduce : public testing::TestWithParam<Case> {};

// Shared memory has tests of its own; both add in the order of the ranks.
TEST_P(TcpAllreduce, GivesTheSameAsSharedMemory) {
  const auto [world_size, in_place, weighted, codec, streams, group] = GetParam();
  const auto tcp = over_tcp(world_size, streams);
  const auto shm = connected(world_size, ShmExecutor::kSlotBytes);
  for (const auto& counts : group > 0 ? kLargeLayouts : kLayouts) {
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
      if (group > 0) go_in_groups(tcp[rank]->ways(), group, world_size);
      const Result second = tcp[rank]->run(again, 30);
      EXPECT_EQ(first.lanes, second.lanes);
      EXPECT_EQ(first.weight_sum, second.weight_sum);
      if (codec == Codec::kNone) {
        EXPECT_EQ(got, want) << "rank " << rank;
      }
      // Sums of many values travel compressed, too. The other ranks have the same bits.
      for (size_t i = 0; rank == 0 && codec != Codec::kNone && i < counts.size(); ++i) {
        float most = 0;
        for (size_t k = 0; k < counts[i]; ++k) most = std::max(most, std::abs(got[i][k] - want[i][k]));
        EXPECT_LT(most, codec > Codec::kInt4 ? 3.f : codec == Codec::kInt4 ? 0.3f : 0.1f);
      }
      results[rank] = got;
    });
    for (int rank = 1; rank < world_size; ++rank) EXPECT_EQ(results[rank], results[0]) << "rank " << rank;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int world_size : {2, 3, 5}) {
    for (bool both : {false, true}) all.push_back({world_size, both, both, Codec::kNone});
    for (Codec codec : {Codec::kBFloat16, Codec::kInt8, Codec::kInt4, Codec::kBits2, Codec::kBits1})
      all.push_back({world_size, true, false, codec});
    all.push_back({world_size, false, true, Codec::kFloat16});
    all.push_back({world_size, true, false, Codec::kNone, 4});
    all.push_back({world_size, false, true, Codec::kInt8, 3});
  }
  for (const auto& [world_size, group] : {std::pair{3, 1}, {4, 2}, {4, 1}, {6, 3}, {6, 2}}) {
    for (bool both : {false, true}) {
      all.push_back({world_size, both, !both, Codec::kNone, both ? 3 : 1, group});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, TcpAllreduce, testing::ValuesIn(thinned(cases())));

TEST(TcpParts, AreEqualWhereNothingIsKnownAndWhereItDoesNotPay) {
  Parts parts(4);
  EXPECT_EQ(parts.edges(100), (std::vector<size_t>{0, 25, 50, 75, 100}));
  parts.told({9'000'000, 0, 1'000'000, 9'000'000});
  EXPECT_EQ(parts.edges(100), (std::vector<size_t>{0, 25, 50, 75, 100}));
  parts.told({1'000'000, 1'000'000, 950'000, 1'000'000});
  EXPECT_EQ(parts.edges(100), (std::vector<size_t>{0, 25, 50, 75, 100}));
  Parts pair(2);
  pair.told({1'000'000, 9'000'000});
  EXPECT_EQ(pair.edges(100), (std::vector<size_t>{0, 50, 100}));
}

TEST(TcpParts, ASlowLinkOwnsLess) {
  Parts parts(4);
  parts.told({10'000'000, 1'000'000, 10'000'000, 10'000'000});
  const auto uneven = parts.edges(1'000'000);
  EXPECT_LT(uneven[2] - uneven[1], 10'000U);
  EXPECT_NEAR(static_cast<double>(uneven[1]), 333'333, 10'000);
  // All take as long: a rank moves 1 of all and twice what it owns.
  parts.told({10'000'000, 6'000'000, 10'000'000, 10'000'000});
  const auto edges = parts.edges(1'000'000);
  const auto time = [&](int rank, double rate) {
    return (1e6 + 2 * static_cast<double>(edges[rank + 1] - edges[rank])) / rate;
  };
  EXPECT_NEAR(time(1, 6), time(0, 10), 0.01 * time(0, 10));
  EXPECT_NEAR(time(2, 10), time(0, 10), 0.01 * time(0, 10));
  EXPECT_EQ(edges.back(), 1'000'000U);
}

TEST(TcpParts, AnyRatesDivideAll) {
  std::mt19937_64 random(1);
  for (int turn = 0; turn < 2000; ++turn) {
    const int ranks = 1 + static_cast<int>(random() % 20);
    Parts parts(ranks);
    std::vector<uint64_t> rates(ranks);
    for (uint64_t& rate : rates) rate = random() % 3 == 0 ? 0 : random() >> (14 + random() % 50);
    parts.told(rates);
    const size_t lines = random() >> (30 + random() % 34);
    const auto edges = parts.edges(lines);
    ASSERT_EQ(edges.size(), static_cast<size_t>(ranks) + 1);
    EXPECT_EQ(edges.front(), 0U);
    EXPECT_EQ(edges.back(), lines);
    EXPECT_TRUE(std::ranges::is_sorted(edges));
  }
}

TEST(TcpParts, ASpeedIsAveragedWithEarlierOnes) {
  Parts parts(3);
  EXPECT_EQ(parts.rate(), 0U);
  for (double rate : {1000., 0., 2000.}) parts.measured(rate);
  EXPECT_EQ(parts.rate(), 1500U);
  parts.measured(700);
  EXPECT_EQ(parts.rate(), 1400U);
}

struct Record {
  double seconds, sent, received;  // so many MiB
};

// What a LinkSpeed makes of these records, in MiB per second.
double speed_of(double mib, const std::vector<Record>& records) {
  constexpr double kMiB = 1 << 20;
  LinkSpeed speed(static_cast<uint64_t>(mib * kMiB));
  const auto begin = Clock::now();
  for (const Record& each : records) {
    speed.record({static_cast<uint64_t>(each.sent * kMiB), static_cast<uint64_t>(each.received * kMiB)},
                 begin + std::chrono::microseconds(static_cast<int64_t>(1e6 * each.seconds)));
  }
  return speed.rate() / kMiB;
}

TEST(TcpLinkSpeed, IsThatOfTheFastestSpanInTheSlowerDirection) {
  EXPECT_EQ(speed_of(16, {}), 0);
  // Half of the bytes in a second, and the rest, for which it waits for another rank, in three.
  EXPECT_NEAR(speed_of(16, {{0, 0, 0}, {1, 8, 8}, {4, 16, 16}}), 8, 0.01);
  EXPECT_NEAR(speed_of(16, {{0, 0, 0}, {1, 8, 4}, {3, 16, 16}}), 6, 0.01);
  // Few bytes that come at once, as from a queue, tell nothing.
  EXPECT_NEAR(speed_of(16, {{0, 0, 0}, {1, 2, 2}, {1.01, 2.5, 2.5}, {2, 4, 4}}), 2, 0.01);
  EXPECT_EQ(speed_of(0.6, {{0, 0, 0}, {0.01, 0.3, 0.3}}), 0);
  // New connections count from 0.
  EXPECT_NEAR(speed_of(16, {{0, 90, 90}, {1, 0, 0}, {2, 3, 3}}), 3, 0.01);
}

TEST(TcpLinks, RanksTogetherHaveFewBytesInFlightToOne) {
  for (int world_size : {2, 4}) {
    const auto sockets = meshes(world_size, 1);
    spawn(world_size, [&](int rank) {
      Links links(rank, sockets[rank]);
      CollectiveMemory memory;
      Parts parts(world_size);
      Ways ways(world_size);
      uint32_t number = 0;
      // The bytes that all others may have in flight to this rank, after it has read many.
      const auto in_flight = [&] {
        Floats tensors{std::vector<float>(1'000'000, rank)};
        Operation operation = allreduce(DType::kFloat32, tensors, tensors);
        operation.kind = Kind::kBroadcast;
        for (operation.root = 0; operation.root < world_size; ++operation.root) {
          Collective(links, memory, parts, ways, operation, number++, 30).run();
        }
        int sum = 0;
        for (const auto& own : sockets[rank]) {
          int bytes = 0;
          socklen_t length = sizeof bytes;
          if (own.empty()) continue;
          EXPECT_EQ(getsockopt(own[Links::kData], IPPROTO_TCP, TCP_WINDOW_CLAMP, &bytes, &length), 0);
          sum += bytes;
        }
        return sum;
      };
      constexpr int kFew = 224 * 1024, kMany = 1'250'000;  // what 1 Gbit/s carries in 10 ms
      EXPECT_EQ(in_flight() < kMany, world_size > 2);      // nothing is known yet
      std::vector<uint64_t> rates(world_size, 125'000'000);
      for (const bool has_slow : {false, true, false}) {
        rates[0] = has_slow ? 5'000'000 : 125'000'000;
        links.share_windows(rates, world_size - 1);
        const int found = in_flight();
        if (world_size == 2) {
          EXPECT_GT(found, kMany);
        } else if (has_slow) {
          const int others = world_size - 1, slow = rank == 0 ? others : 1;
          const int few = std::max(kFew / others, 2 * 65'483);  // two packets of this host's at least
          EXPECT_NEAR(found, few * slow + kMany / others * (others - slow), kMany / 4);
        } else {
          EXPECT_NEAR(found, kMany, kMany / 4);
        }
      }
    });
  }
}

TEST(TcpParts, TheBitsAreTheSameWhateverTheParts) {
  for (const std::vector<uint64_t>& rates : {std::vector<uint64_t>{0, 0, 0},
                                             {9'000'000, 1'000'000, 9'000'000},
                                             {9'000'000, 8'000'000, 5'000'000}}) {
    const auto sockets = meshes(3, 1);
    const auto shm = connected(3, ShmExecutor::kSlotBytes);
    spawn(3, [&](int rank) {
      Links links(rank, sockets[rank]);
      CollectiveMemory memory;
      for (uint32_t number = 0; number < 2; ++number) {
        Parts parts(3);
        Ways ways(3);
        parts.told(rates);
        Floats want = random_floats({700'000, 3, 5000}, rank), got = want;
        shm[rank]->run(allreduce(DType::kFloat32, want, want), 30);
        const Operation operation = allreduce(DType::kFloat32, got, got);
        Collective(links, memory, parts, ways, operation, number, 30).run();
        EXPECT_EQ(got, want) << "rank " << rank;
      }
    });
  }
}

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

// What all ranks hear of some operations that cost the slowest rank so much.
void judge(Ways& ways, uint64_t expected, const std::vector<uint64_t>& costs) {
  for (uint64_t cost : costs) {
    ways.ended(ways.group(), 4 * cost, 4 << 20, expected);
    EXPECT_EQ(ways.cost(), cost);
    ways.told({cost / 2, cost, 0});
    EXPECT_EQ(ways.cost(), 0U);
  }
}

TEST(TcpWays, GroupsAreTriedWhereOneTakesLongerThanTheLinksExplainAndTheBestAreKept) {
  Ways ways(12);
  judge(ways, 0, {900, 900, 900});  // nothing is known of the links
  judge(ways, 100, {160, 140, 160, 140});
  EXPECT_EQ(ways.group(), 12);
  judge(ways, 100, {200, 200});
  for (const auto& [group, cost] : {std::pair{6, 190}, {4, 180}, {3, 176}, {2, 250}, {1, 180}}) {
    EXPECT_EQ(ways.group(), group);
    EXPECT_EQ(ways.settled(), 12);
    judge(ways, 100, {static_cast<uint64_t>(cost)});
  }
  EXPECT_EQ(ways.group(), 12) << "they gain too little";
  judge(ways, 100, std::vector<uint64_t>(63, 200));
  EXPECT_EQ(ways.group(), 12) << "they have been tried a moment ago";
  judge(ways, 100, {200});
  EXPECT_EQ(ways.group(), 6);
  judge(ways, 100, {190, 110, 120, 250, 180});
  EXPECT_EQ(ways.group(), 4);
  EXPECT_EQ(ways.settled(), 4);
  judge(ways, 100, std::vector<uint64_t>(1023, 300));
  EXPECT_EQ(ways.group(), 4);
  judge(ways, 100, {110});
  EXPECT_EQ(ways.group(), 12) << "it may be quicker by now";
  EXPECT_EQ(ways.settled(), 4);
  judge(ways, 100, std::vector<uint64_t>(500, 140));
  EXPECT_EQ(ways.group(), 12);
  EXPECT_EQ(ways.settled(), 12);
}

TEST(TcpWays, AnOperationThatBeganBeforeTheGroupsChangedTellsNothing) {
  Ways ways(4);
  judge(ways, 100, {200, 200});
  ASSERT_EQ(ways.group(), 2);
  ways.ended(4, 1000, 1 << 20, 100);
  ways.told({1000});
  ways.told({1});  // nothing has ended since
  EXPECT_EQ(ways.group(), 2);
}

TEST(TcpWays, APrimeNumberOfRanksHasGroupsOfOne) {
  Ways ways(7);
  judge(ways, 100, {200, 200});
  EXPECT_EQ(ways.group(), 1);
  judge(ways, 100, {100, 300});
  EXPECT_EQ(ways.group(), 1);
}

TEST(TcpGroups, GiveTheBitsOfOneWhateverTheReductionAndWhoeverTakesPart) {
  const auto kWeights = thinned<std::vector<double>>(
      {{1, 1, 1, 1}, {0, 2, 0, 1}, {0, 0, 0, 0}, {0.3, 1, 0, 0}, {1, 0, 0, 0}, {0, 0, 3, 0}});
  for (Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kMin, Reduction::kProduct}) {
    for (const auto& weights : kWeights) {
      const auto executors = over_tcp(4);
      spawn(4, [&](int rank) {
        const Floats given = random_floats({200'000, 3, 100'000, 5}, rank);
        Floats want;
        for (int group : {4, 2, 1}) {
          Floats found = given;
          if (weights[rank] == 0) found[0][7] = NAN;  // of a rank that is left out
          Operation operation = allreduce(DType::kFloat32, found, found);
          operation.reduction = reduction;
          operation.weight = weights[rank];
          if (rank % 2 == 1) operation.inputs[1] = nullptr;
          if (rank == 2) operation.outputs[2] = nullptr;
          go_in_groups(executors[rank]->ways(), group, 4);
          executors[rank]->run(operation, 30);
          if (group == 4) want = found;
          for (size_t i = 0; i < found.size(); ++i) {
            EXPECT_EQ(std::memcmp(found[i].data(), want[i].data(), want[i].size() * sizeof(float)), 0)
                << "rank " << rank << ", tensor " << i << ", groups of " << group << ", "
                << reduction_name(reduction);
          }
        }
      });
    }
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
  for (int streams = 1; streams <= 5; ++streams) {
    auto executors = over_tcp(3, streams);
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

TEST(Tcp, CountsWhatGoesToAndComesFromEachRank) {
  const auto executors = over_tcp(2);
  spawn(2, [&](int rank) {
    Floats tensors = {std::vector<float>(1 << 20, 1)};
    executors[rank]->run(allreduce(DType::kFloat32, tensors, tensors, "x"), 30);
    executors[rank]->close();
  });
  for (int rank : {0, 1}) {
    const auto counts = executors[rank]->counts();
    ASSERT_EQ(counts.size(), 2U);
    EXPECT_EQ(counts[rank].sent, 0U);
    EXPECT_GT(counts[1 - rank].received, 4U << 20);
    EXPECT_LT(counts[1 - rank].received, 5U << 20);
    EXPECT_GT(counts[1 - rank].round_trip, 0);
  }
}

TEST(Tcp, ASocketInPlaceOfABrokenOneCountsOn) {
  LinkMeter meter(2);
  for (size_t bytes : {1000, 100}) {
    const auto [one, other] = pair();
    const std::string data(bytes, 'x');
    ASSERT_EQ(send(one, data.data(), bytes, 0), static_cast<ssize_t>(bytes));
    meter.read({{}, {other}});
    meter.read({{}, {other}});
    close(one);
    close(other);
    meter.read({{}, {other}});
  }
  EXPECT_EQ(meter.counts()[1].received, 1100U);
}

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
  for (int streams : {1, 3}) {
    const auto sockets = meshes(2, streams);
    TcpExecutor mine(0, sockets[0]);
    for (int socket : sockets[1][0]) close(socket);
    const Error error = caught([&] { mine.run(allgather("x", "end"), 30); });
    EXPECT_EQ(error.code(), Code::kPeerLost);
    EXPECT_STREQ(error.what(), "rank 1 (127.0.0.1) is gone; waited for it in allgather \"end\"");
  }
}

TEST(Tcp, ARankThatHasEndedIsNamed) {
  for (int streams : {1, 3}) {
    const auto executors = over_tcp(2, streams);
    executors[1]->close();
    const Error error = caught([&] { executors[0]->run(allgather("x", "end"), 30); });
    EXPECT_EQ(error.code(), Code::kPeerLost);
    EXPECT_STREQ(error.what(), "rank 1 (127.0.0.1) has ended; waited for it in allgather \"end\"");
  }
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
  const int streams = 1 + GetParam() % 2;
  const auto all = meshes(2, streams);
  const auto& sockets = all[1][0];
  TcpExecutor mine(0, all[0]);
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
  const uint64_t stripe[] = {0, random() % 3 == 0 ? random() : sizeof head};
  if (streams > 1) bytes.insert(0, reinterpret_cast<const char*>(stripe), sizeof stripe);
  for (int left = 1 + static_cast<int>(random() % 3); left > 0; --left) {
    bytes[random() % 64] = static_cast<char>(random());
  }
  bytes.append(random() % 64, static_cast<char>(random()));
  ASSERT_EQ(send(sockets[Links::kData], bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  if (random() % 4 == 0) {
    ASSERT_GT(send(sockets[Links::kNotices], bytes.data(), 12, MSG_NOSIGNAL), 0);
  }
  for (int socket : sockets) close(socket);
  const Error error = caught([&] { mine.run(operation, 30); });
  EXPECT_NE(error.code(), Code::kInternal) << error.what();
  EXPECT_NE(error.code(), Code::kTimeout) << error.what();  // it has gone
}
INSTANTIATE_TEST_SUITE_P(Seeds, TcpRubbish, testing::Range(0, 300));

}  // namespace
}  // namespace dadt::tcp_test
