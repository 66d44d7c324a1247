#include "negotiation/negotiation.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "ranks.h"

namespace dadt::negotiation_test {
namespace {

constexpr size_t kSlot = 4096;
constexpr double kLong = 30;

// Ranks as threads, each with an engine of its own.
class World {
 public:
  explicit World(int size, const NegotiationOptions& options = {}, bool is_pulled = false)
      : executors_(connected(size, kSlot)) {
    if (is_pulled) executors_.assign(size, nullptr);
    std::vector<std::vector<int>> sockets(size, {-1});
    sockets[0].resize(size, -1);
    for (int rank = 1; rank < size; ++rank) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      sockets[0][rank] = ends[0];
      sockets[rank] = {ends[1]};
    }
    for (int rank = 0; rank < size; ++rank) {
      engines.push_back(std::make_unique<Engine>(executors_[rank], rank, size, kLong));
      ranks.push_back(
          std::make_unique<Negotiation>(*engines[rank], *engines[rank], rank, size, sockets[rank], options));
      sockets_.push_back(sockets[rank]);
    }
  }
  ~World() { close(); }

  void close() {
    spawn(static_cast<int>(ranks.size()), [&](int rank) {
      if (ranks[rank] != nullptr) ranks[rank]->close(kLong);
      if (ranks[rank] != nullptr) engines[rank]->close(kLong);
    });
  }
  // Ends a rank's connections, as its death would.
  void cut(int rank) {
    for (int fd : sockets_[rank]) {
      if (fd >= 0) shutdown(fd, SHUT_RDWR);
    }
  }

  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::unique_ptr<Negotiation>> ranks;

 private:
  std::vector<std::shared_ptr<ShmExecutor>> executors_;
  std::vector<std::vector<int>> sockets_;
};

// As "t" + std::to_string(1), of which GCC 12 believes that it overlaps itself.
std::string numbered(std::string text, int number) { return text.append(std::to_string(number)); }

// One tensor of a rank: filled with `value`, summed in place.
template <typename T = float>
struct Tensor {
  Tensor(std::string tensor_name, size_t count, T value, DType tensor_dtype = DType::kFloat32)
      : name(std::move(tensor_name)), dtype(tensor_dtype), data(count, value) {}

  Operation operation(Reduction reduction = Reduction::kSum) {
    Operation operation;
    operation.name = name;
    operation.reduction = reduction;
    operation.layout = Layout(dtype, {data.size()});
    operation.inputs = {data.data()};
    operation.outputs = {data.data()};
    return operation;
  }
  std::string signature() const {
    return std::string("all_reduce ") + dtype_name(dtype) + " [" + std::to_string(data.size()) + "]";
  }
  std::shared_ptr<Ticket> submit(Negotiation& to, std::string group = {}, uint64_t size = 0) {
    return ticket = to.submit(operation(), signature(), std::move(group), size);
  }

  std::string name;
  DType dtype;
  std::vector<T> data;
  std::shared_ptr<Ticket> ticket;
};

const Result& finished(const std::shared_ptr<Ticket>& ticket) {
  EXPECT_TRUE(ticket->wait(deadline_after(kLong))) << ticket->name();
  return ticket->result();
}

void expect_good(const std::shared_ptr<Ticket>& ticket) {
  const Result& result = finished(ticket);
  EXPECT_FALSE(result.error) << ticket->name() << ": " << result.error->what();
}

Error error_of(const std::shared_ptr<Ticket>& ticket) {
  return finished(ticket).error.value_or(Error(Code::kInternal, "it went well"));
}

// A cycle that never ends by itself: only waiting, or a full buffer, makes anything run.
NegotiationOptions patient() {
  NegotiationOptions options;
  options.cycle = 600;
  return options;
}

class Sizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sizes, testing::Values(1, 2, 3, 4));

TEST_P(Sizes, EveryRankMaySubmitInAnOrderOfItsOwn) {
  const int size = GetParam();
  constexpr int kTensors = 200;
  World world(size);
  std::vector<std::set<Work*>> works(size);
  spawn(size, [&](int rank) {
    std::mt19937 random(rank);
    for (int turn = 0; turn < 5; ++turn) {
      std::vector<Tensor<float>> tensors;
      for (int i = 0; i < kTensors; ++i) tensors.emplace_back(numbered("t", i), i % 7, i + rank);
      std::shuffle(tensors.begin(), tensors.end(), random);
      for (auto& tensor : tensors) tensor.submit(*world.ranks[rank]);
      for (auto& tensor : tensors) {
        expect_good(tensor.ticket);
        const int i = std::stoi(tensor.name.substr(1));
        const float sum = static_cast<float>(size * i + size * (size - 1) / 2);
        EXPECT_EQ(tensor.data, std::vector<float>(i % 7, sum)) << tensor.name;
        if (turn == 4) works[rank].insert(tensor.ticket->work().get());
      }
    }
  });
  EXPECT_LT(works[0].size(), kTensors / 2u);
  for (const auto& others : works) EXPECT_EQ(others.size(), works[0].size());
}

TEST(Negotiation, ManyThreadsMaySubmit) {
  constexpr int kThreads = 4;
  World world(2);
  spawn(2, [&](int rank) {
    spawn(kThreads, [&](int thread) {
      for (int i = 0; i < 50; ++i) {
        // Another thread's number is the peer's: whoever submits it.
        const int number = rank == 0 ? thread : kThreads - 1 - thread;
        Tensor<float> tensor(numbered(numbered("", number) + "/", i), 3, static_cast<float>(i));
        expect_good(tensor.submit(*world.ranks[rank]));
        EXPECT_EQ(tensor.data[2], 2.0f * i);
      }
    });
  });
}

TEST(Negotiation, OneThatIsWaitedForByAllNeedsNoCompany) {
  World world(3, patient());
  spawn(3, [&](int rank) {
    for (int i = 0; i < 20; ++i) {
      Tensor<float> tensor(i % 2 == 0 ? "cached" : numbered("new", i), 10, 1);
      expect_good(tensor.submit(*world.ranks[rank]));
      EXPECT_EQ(tensor.data[9], 3);
    }
  });
}

TEST(Negotiation, AFullBufferNeedsNobodyToWait) {
  NegotiationOptions options = patient();
  options.buffer_bytes = 4 * 100;
  World world(2, options);
  spawn(2, [&](int rank) {
    std::vector<Tensor<float>> tensors;
    for (int i = 0; i < 4; ++i) tensors.emplace_back(numbered("t", i), 50, 1);
    for (int i = 0; i < 4; i += 2) {
      // Two at a time: of four, three may be reported at once, and the fourth then fills no buffer alone.
      tensors[i].submit(*world.ranks[rank]);
      tensors[i + 1].submit(*world.ranks[rank]);
      // Not by waiting: that would make all of it run.
      const auto deadline = deadline_after(kLong);
      while (!tensors[i].ticket->done() || !tensors[i + 1].ticket->done()) {
        ASSERT_LT(Clock::now(), deadline);
        std::this_thread::yield();
      }
    }
    EXPECT_EQ(tensors[0].ticket->work(), tensors[1].ticket->work());
    EXPECT_EQ(tensors[2].ticket->work(), tensors[3].ticket->work());
    EXPECT_EQ(tensors[0].ticket->work()->operation().name, "t0 and 1 more");
  });
}

TEST(Negotiation, ACycleThatEndsNeedsNobodyToWait) {
  World world(2);
  spawn(2, [&](int rank) {
    Tensor<float> tensor("alone", 5, 1);
    tensor.submit(*world.ranks[rank]);
    const auto deadline = deadline_after(kLong);
    while (!tensor.ticket->done()) {
      ASSERT_LT(Clock::now(), deadline);
      std::this_thread::yield();
    }
    EXPECT_EQ(tensor.data[0], 2);
  });
}

TEST(Negotiation, FusionGoesAcrossOtherDtypes) {
  World world(2, patient());
  spawn(2, [&](int rank) {
    std::vector<Tensor<float>> floats;
    std::vector<Tensor<int64_t>> integers;
    for (int i = 0; i < 8; ++i) {
      floats.emplace_back(numbered("t", 2 * i), 10, 1);
      integers.emplace_back(numbered("t", 2 * i + 1), 10, 1, DType::kInt64);
    }
    for (int i = 0; i < 8; ++i) {
      const int mine = rank == 0 ? i : 7 - i;
      integers[mine].submit(*world.ranks[rank]);
      floats[mine].submit(*world.ranks[rank]);
    }
    for (int i = 0; i < 8; ++i) {
      expect_good(floats[i].ticket);
      expect_good(integers[i].ticket);
      EXPECT_EQ(floats[i].ticket->work(), floats[0].ticket->work());
      EXPECT_EQ(integers[i].ticket->work(), integers[0].ticket->work());
      EXPECT_EQ(integers[i].data[3], 2);
    }
    EXPECT_NE(floats[0].ticket->work(), integers[0].ticket->work());
  });
}

TEST(Negotiation, WithoutABufferNothingIsFused) {
  NegotiationOptions options = patient();
  options.buffer_bytes = 0;
  World world(2, options);
  spawn(2, [&](int rank) {
    Tensor<float> one("one", 5, 1), other("other", 5, 1);
    one.submit(*world.ranks[rank]);
    other.submit(*world.ranks[rank]);
    expect_good(one.ticket);
    expect_good(other.ticket);
    EXPECT_NE(one.ticket->work(), other.ticket->work());
  });
}

TEST(Negotiation, OtherKindsRunAmongThem) {
  World world(3);
  spawn(3, [&](int rank) {
    Tensor<float> sum("sum", 4, 1), sent("sent", 4, static_cast<float>(rank));
    Operation broadcast = sent.operation();
    broadcast.kind = Kind::kBroadcast;
    broadcast.root = 2;
    const std::string word(rank + 1, static_cast<char>('a' + rank));
    Operation exchange;
    exchange.kind = Kind::kExchange;
    exchange.name = "words";
    exchange.layout = Layout(DType::kUInt8, std::vector<size_t>(3, word.size()));
    exchange.inputs.assign(3, word.data());
    std::vector<std::function<void()>> submits;
    std::shared_ptr<Ticket> sent_ticket, words;
    submits.push_back([&] { sum.submit(*world.ranks[rank]); });
    submits.push_back([&] { sent_ticket = world.ranks[rank]->submit(broadcast, "broadcast"); });
    submits.push_back([&] { words = world.ranks[rank]->submit(exchange, "all_gather"); });
    std::rotate(submits.begin(), submits.begin() + rank, submits.end());
    for (const auto& submit : submits) submit();
    for (const auto& ticket : {sum.ticket, sent_ticket, words}) expect_good(ticket);
    EXPECT_EQ(sum.data[0], 3);
    EXPECT_EQ(sent.data[0], 2);
    const auto& received = words->result().received;
    ASSERT_EQ(received.size(), 3u);
    for (size_t from = 0; from < 3; ++from) {
      EXPECT_EQ(std::string(reinterpret_cast<char*>(received[from].data.get()), received[from].bytes),
                std::string(from + 1, static_cast<char>('a' + from)));
    }
  });
}

TEST(Negotiation, AGroupRunsTogether) {
  World world(2);
  spawn(2, [&](int rank) {
    std::vector<Tensor<float>> members;
    for (int i = 0; i < 3; ++i) members.emplace_back(numbered("g", i), 5, 1);
    Tensor<float> other("other", 5, 1);
    other.submit(*world.ranks[rank]);
    for (int i = 0; i < 3; ++i) members[rank == 0 ? i : 2 - i].submit(*world.ranks[rank], "group", 3);
    const auto deadline = deadline_after(kLong);
    while (!members[0].ticket->done() || !members[1].ticket->done() || !members[2].ticket->done()) {
      ASSERT_LT(Clock::now(), deadline);
      std::this_thread::yield();
    }
    EXPECT_EQ(members[0].ticket->work(), members[2].ticket->work());
    EXPECT_EQ(members[1].data[4], 2);
    expect_good(other.ticket);
    EXPECT_NE(other.ticket->work(), members[0].ticket->work());
  });
}

TEST(Negotiation, AGroupWaitsForItsLastMember) {
  World world(2);
  std::barrier both(2);
  spawn(2, [&](int rank) {
    Tensor<float> one("one", 5, 1), two("two", 5, 1), after("after", 5, 1);
    one.submit(*world.ranks[rank], "pair", 2);
    expect_good(after.submit(*world.ranks[rank]));
    EXPECT_FALSE(one.ticket->decided());
    both.arrive_and_wait();
    two.submit(*world.ranks[rank], "pair", 2);
    expect_good(two.ticket);
    expect_good(one.ticket);
    EXPECT_EQ(one.ticket->work(), two.ticket->work());
  });
}

TEST(Negotiation, OneMemberThatDiffersFailsItsGroupAndNothingElse) {
  World world(2);
  for (int turn = 0; turn < 3; ++turn) {
    spawn(2, [&](int rank) {
      Tensor<float> one("one", 5, 1), two("two", turn == 1 && rank == 1 ? 6 : 5, 1), other("other", 5, 1);
      one.submit(*world.ranks[rank], "pair", 2);
      other.submit(*world.ranks[rank]);
      two.submit(*world.ranks[rank], "pair", 2);
      expect_good(other.ticket);
      if (turn != 1) {
        expect_good(one.ticket);
        expect_good(two.ticket);
        return;
      }
      for (const auto& ticket : {one.ticket, two.ticket}) {
        EXPECT_EQ(error_of(ticket).code(), Code::kMismatch);
        EXPECT_STREQ(error_of(ticket).what(),
                     "\"two\": rank 0 has all_reduce float32 [5], rank 1 has all_reduce float32 [6]");
      }
    });
  }
}

TEST(Negotiation, RanksThatDifferAreNamedOnAllAndTheRestGoesOn) {
  World world(3);
  spawn(3, [&](int rank) {
    for (int turn = 0; turn < 3; ++turn) {
      const bool differs = turn == 1 && rank == 2;
      Tensor<float> single("grad", 3, 1);
      Tensor<double> twice("grad", 3, 1, DType::kFloat64);
      const auto ticket = differs ? twice.submit(*world.ranks[rank]) : single.submit(*world.ranks[rank]);
      if (turn != 1) {
        expect_good(ticket);
        continue;
      }
      EXPECT_EQ(error_of(ticket).code(), Code::kMismatch);
      EXPECT_STREQ(error_of(ticket).what(),
                   "\"grad\": rank 0 has all_reduce float32 [3], rank 2 has all_reduce float64 [3]");
    }
    EXPECT_FALSE(world.ranks[rank]->error());
  });
}

TEST(Negotiation, WhatSignaturesDoNotTellIsCompared) {
  World world(2);
  spawn(2, [&](int rank) {
    Tensor<float> tensor("x", rank == 0 ? 3 : 4, 1);
    const Error error = error_of(world.ranks[rank]->submit(tensor.operation(), "the same"));
    EXPECT_EQ(error.code(), Code::kMismatch);
    EXPECT_STREQ(
        error.what(),
        "\"x\": rank 0 has the same (allreduce sum of 12 bytes of float32 in 1 tensors, in no group), "
        "rank 1 has the same (allreduce sum of 16 bytes of float32 in 1 tensors, in no group)");
    Tensor<float> grouped("y", 3, 1);
    const Error other =
        error_of(rank == 0 ? grouped.submit(*world.ranks[rank]) : grouped.submit(*world.ranks[rank], "g", 2));
    EXPECT_NE(std::string(other.what()).find("in no group)"), std::string::npos) << other.what();
    EXPECT_NE(std::string(other.what()).find("in group \"g\" of 2)"), std::string::npos) << other.what();
  });
}

TEST(Negotiation, ATensorOfANewShapeIsNewOnAllRanks) {
  World world(2);
  spawn(2, [&](int rank) {
    for (size_t count : {3u, 3u, 5u, 5u, 3u}) {
      Tensor<float> tensor("x", count, 1);
      expect_good(tensor.submit(*world.ranks[rank]));
      EXPECT_EQ(tensor.data, std::vector<float>(count, 2));
    }
  });
}

TEST(Negotiation, TheCacheForgetsWhatWasUsedLongAgo) {
  NegotiationOptions options;
  options.cache_capacity = 4;
  World world(3, options);
  spawn(3, [&](int rank) {
    std::mt19937 random(rank);
    for (int turn = 0; turn < 40; ++turn) {
      std::vector<Tensor<float>> tensors;
      for (int i = 0; i < 6; ++i) tensors.emplace_back(numbered("t", i + turn % 3), 5, 1);
      tensors.emplace_back(numbered("only ", turn), 5, 1);
      std::shuffle(tensors.begin(), tensors.end(), random);
      for (auto& tensor : tensors) tensor.submit(*world.ranks[rank]);
      for (auto& tensor : tensors) {
        expect_good(tensor.ticket);
        EXPECT_EQ(tensor.data, std::vector<float>(5, 3));
      }
    }
  });
}

TEST(Negotiation, ANameThatIsPendingIsRefused) {
  World world(2, patient());
  Tensor<float> one("x", 5, 1), again("x", 5, 1), other("x", 5, 1);
  one.submit(*world.ranks[0]);
  try {
    again.submit(*world.ranks[0]);
    ADD_FAILURE() << "not refused";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "\"x\" is pending already: wait for it, or use another name");
  }
  other.submit(*world.ranks[1]);
  spawn(2, [&](int rank) { expect_good(rank == 0 ? one.ticket : other.ticket); });
  spawn(2, [&](int rank) { expect_good((rank == 0 ? again : other).submit(*world.ranks[rank])); });
}

TEST(Negotiation, RefusesWhatIsNoNamedTensor) {
  World world(1);
  Negotiation& rank = *world.ranks[0];
  Tensor<float> tensor("x", 5, 1);
  Operation operation = tensor.operation();
  operation.name.clear();
  EXPECT_THROW(rank.submit(operation, "s"), std::invalid_argument);
  operation = tensor.operation();
  operation.weight = 2;
  EXPECT_THROW(rank.submit(operation, "s"), std::invalid_argument);
  operation = tensor.operation();
  operation.inputs.clear();
  EXPECT_THROW(rank.submit(operation, "s"), std::invalid_argument);
  EXPECT_THROW(rank.submit(tensor.operation(), "s", "group"), std::invalid_argument);
  EXPECT_THROW(rank.submit(allgather("x"), "s"), std::invalid_argument);
  EXPECT_THROW(Negotiation(*world.engines[0], *world.engines[0], 0, 2, {}, {}), std::invalid_argument);
}

// Joining ---------------------------------------------------------------------------------------------

TEST(Join, RanksThatEndEarlyGiveNothing) {
  World world(3);
  std::vector<int> last(3, -1);
  for (int turn = 0; turn < 2; ++turn) {
    spawn(3, [&](int rank) {
      // Rank r has r + 1 batches.
      for (int batch = 0; batch <= rank; ++batch) {
        Tensor<float> mean("mean", 7, static_cast<float>(rank)),
            most("most", 3, static_cast<float>(-rank - 1));
        const auto averaged = world.ranks[rank]->submit(mean.operation(Reduction::kMean), "mean");
        expect_good(world.ranks[rank]->submit(most.operation(Reduction::kMax), "max"));
        expect_good(averaged);
        EXPECT_EQ(mean.data[6], (batch + 2) / 2.0f);  // of ranks batch, ..., 2
        EXPECT_EQ(most.data[2], static_cast<float>(-batch - 1));
      }
      const auto joined = world.ranks[rank]->join();
      expect_good(joined);
      last[rank] = joined->last_joined();
    });
    EXPECT_EQ(last, std::vector<int>(3, 2));
  }
}

TEST(Join, WhatWasSubmittedBeforeCounts) {
  World world(2, patient());
  std::barrier both(2);
  spawn(2, [&](int rank) {
    Tensor<float> early("early", 4, 1), late("late", 4, 1);
    early.submit(*world.ranks[rank]);
    std::shared_ptr<Ticket> joined;
    if (rank == 0) {
      joined = world.ranks[rank]->join();
      EXPECT_THROW(late.submit(*world.ranks[rank]), std::invalid_argument);
      EXPECT_THROW(world.ranks[rank]->join(), std::invalid_argument);
    } else {
      late.submit(*world.ranks[rank]);
      expect_good(late.ticket);
      EXPECT_EQ(late.data[0], 1);
      joined = world.ranks[rank]->join();
    }
    expect_good(early.ticket);
    EXPECT_EQ(early.data[0], 2);
    expect_good(joined);
  });
}

TEST(Join, OtherKindsNeedAllRanks) {
  World world(2);
  spawn(2, [&](int rank) {
    if (rank == 1) return expect_good(world.ranks[rank]->join());
    Tensor<float> tensor("x", 4, 1);
    Operation broadcast = tensor.operation();
    broadcast.kind = Kind::kBroadcast;
    const Error error = error_of(world.ranks[rank]->submit(broadcast, "broadcast from rank 0"));
    EXPECT_EQ(error.code(), Code::kMismatch);
    EXPECT_STREQ(
        error.what(),
        "\"x\": rank 1 has joined and takes part in allreduces only; broadcast from rank 0 needs all ranks");
    Tensor<float> sum("sum", 4, 1);
    expect_good(sum.submit(*world.ranks[rank]));
    expect_good(world.ranks[rank]->join());
  });
}

// Ends ------------------------------------------------------------------------------------------------

TEST(NegotiationEnd, ARankThatIsLostFailsEverythingEverywhere) {
  for (int victim : {0, 2}) {
    World world(3, patient());
    std::vector<Tensor<float>> tensors(3, Tensor<float>("x", 5, 1));
    for (int rank : {0, 1, 2}) {
      if (rank != victim) tensors[rank].submit(*world.ranks[rank]);
    }
    world.cut(victim);
    for (int rank : {0, 1, 2}) {
      if (rank == victim) continue;
      const std::string text = error_of(tensors[rank].ticket).what();
      if (victim == 2) {
        EXPECT_EQ(error_of(tensors[rank].ticket).code(), Code::kPeerLost);
        EXPECT_EQ(text, "rank 2 is gone: its connection has ended without a goodbye");
      }
      Tensor<float> later("later", 5, 1);
      EXPECT_STREQ(error_of(later.submit(*world.ranks[rank])).what(), text.c_str());
      EXPECT_STREQ(world.ranks[rank]->error()->what(), text.c_str());
    }
  }
}

TEST(NegotiationEnd, AnAbortReachesAllRanks) {
  for (int aborter : {0, 1, 2}) {
    World world(3, patient());
    std::vector<Tensor<float>> tensors(3, Tensor<float>("x", 5, 1));
    for (int rank : {0, 2}) tensors[rank].submit(*world.ranks[rank]);
    world.ranks[aborter]->abort(Error(Code::kAborted, "enough"));
    world.ranks[aborter]->abort(Error(Code::kAborted, "too late to matter"));
    for (int rank : {0, 2}) {
      const Error error = error_of(tensors[rank].ticket);
      EXPECT_EQ(error.code(), Code::kAborted);
      EXPECT_EQ(error.what(),
                rank == aborter ? "enough" : "rank " + std::to_string(aborter) + " gave up: enough");
    }
  }
}

TEST(NegotiationEnd, AnErrorOfTheEngineFailsWhatIsPending) {
  World world(2, patient());
  Tensor<float> tensor("x", 5, 1), other("y", 5, 1);
  tensor.submit(*world.ranks[0]);
  other.submit(*world.ranks[1]);
  world.engines[0]->abort(Error(Code::kComm, "the network is down"));
  EXPECT_STREQ(error_of(tensor.ticket).what(), "the network is down");
  EXPECT_EQ(error_of(other.ticket).code(), Code::kComm);
}

TEST(NegotiationEnd, AnErrorOfTheEngineReachesTheRanksWhoseTensorsRun) {
  World world(2, {}, true);
  std::vector<Tensor<float>> tensors(2, Tensor<float>("x", 5, 1));
  for (int rank : {0, 1}) tensors[rank].submit(*world.ranks[rank]);
  for (const auto& tensor : tensors) {
    const auto deadline = deadline_after(kLong);
    while (!tensor.ticket->decided() && Clock::now() < deadline) std::this_thread::yield();
  }
  world.engines[1]->abort(Error(Code::kComm, "the network is down"));
  EXPECT_STREQ(error_of(tensors[1].ticket).what(), "the network is down");
  EXPECT_STREQ(error_of(tensors[0].ticket).what(), "rank 1 gave up: the network is down");
}

TEST(NegotiationEnd, CloseWaitsForWhatIsPending) {
  World world(2, patient());
  std::vector<Tensor<float>> tensors(2, Tensor<float>("x", 5, 1));
  tensors[0].submit(*world.ranks[0]);
  std::thread closer([&] { world.ranks[0]->close(kLong); });
  tensors[1].submit(*world.ranks[1]);
  world.ranks[1]->close(kLong);
  closer.join();
  for (int rank : {0, 1}) {
    expect_good(tensors[rank].ticket);
    EXPECT_EQ(tensors[rank].data[0], 2);
    EXPECT_TRUE(world.ranks[rank]->closed());
    EXPECT_FALSE(world.ranks[rank]->error());
    EXPECT_THROW(tensors[rank].submit(*world.ranks[rank]), std::runtime_error);
    EXPECT_FALSE(world.ranks[rank]->notices(kLong));
  }
}

TEST(NegotiationEnd, CloseAbortsWhatIsLateAndSaysSo) {
  World world(2);
  Tensor<float> tensor("x", 5, 1);
  tensor.submit(*world.ranks[0]);
  const Error error = caught([&] { world.ranks[0]->close(0.05); });
  EXPECT_EQ(error.code(), Code::kTimeout);
  EXPECT_STREQ(error.what(), "\"x\" was not decided when the negotiation closed");
  EXPECT_EQ(error_of(tensor.ticket).code(), Code::kAborted);
  Tensor<float> theirs("x", 5, 1);
  EXPECT_EQ(error_of(theirs.submit(*world.ranks[1])).code(), Code::kAborted);
}

TEST(NegotiationEnd, ARankThatHasClosedIsNamedToThoseThatGoOn) {
  for (int leaver : {0, 2}) {
    World world(3);
    world.ranks[leaver]->close(kLong);
    for (int rank : {0, 1, 2}) {
      if (rank == leaver) continue;
      Tensor<float> tensor("x", 5, 1);
      const Error error = error_of(tensor.submit(*world.ranks[rank]));
      EXPECT_EQ(error.code(), Code::kPeerLost);
      EXPECT_EQ(error.what(), "\"x\": rank " + std::to_string(leaver) + " has ended and submits no more");
    }
  }
}

TEST(NegotiationEnd, Rank0StaysUntilAllHaveComeToAGroupThatFails) {
  World world(2);
  Tensor<float> ours("one", 5, 1), our_other("two", 5, 1), theirs("one", 6, 1), their_other("two", 5, 1);
  ours.submit(*world.ranks[0], "pair", 2);
  our_other.submit(*world.ranks[0], "pair", 2);
  theirs.submit(*world.ranks[1], "pair", 2);
  const std::string reason = error_of(our_other.ticket).what();
  std::thread closer([&] { world.ranks[0]->close(kLong); });
  EXPECT_EQ(error_of(theirs.ticket).what(), reason);
  EXPECT_EQ(error_of(their_other.submit(*world.ranks[1], "pair", 2)).what(), reason);
  closer.join();
  EXPECT_FALSE(world.ranks[1]->error());
}

TEST(NegotiationEnd, Rank0StaysForNobodyBeyondItsTimeout) {
  World world(2);
  Tensor<float> ours("one", 5, 1), theirs("one", 6, 1), other("x", 5, 1);
  ours.submit(*world.ranks[0], "pair", 2);
  theirs.submit(*world.ranks[1], "pair", 2);
  const std::string reason = error_of(ours.ticket).what();
  world.ranks[0]->close(0.05);
  EXPECT_EQ(error_of(theirs.ticket).what(), reason);
  EXPECT_EQ(error_of(other.submit(*world.ranks[1])).code(), Code::kPeerLost);
}

TEST(NegotiationEnd, DestructionFailsWhatIsPending) {
  World world(2);
  Tensor<float> tensor("x", 5, 1);
  tensor.submit(*world.ranks[1]);
  world.ranks[1].reset();
  EXPECT_EQ(error_of(tensor.ticket).code(), Code::kAborted);
}

TEST(NegotiationEnd, EverythingIsInertInAForkedChild) {
  World world(2, patient());
  std::vector<Tensor<float>> tensors(2, Tensor<float>("x", 5, 1));
  tensors[0].submit(*world.ranks[0]);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    int refused = 0;
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { tensors[1].submit(*world.ranks[1]); }, [&] { world.ranks[0]->join(); },
             [&] { tensors[0].ticket->wait(deadline_after(1)); }, [&] { world.ranks[0]->notices(1); }}) {
      try {
        use();
      } catch (const std::runtime_error&) {
        ++refused;
      }
    }
    world.ranks[0]->abort(Error(Code::kAborted, "the child"));
    world.ranks[0]->close(kLong);
    world.ranks[0]->forsake();
    tensors[0].ticket.reset();
    world.ranks.clear();
    world.engines.clear();
    _exit(refused == 4 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  tensors[1].submit(*world.ranks[1]);
  spawn(2, [&](int rank) { expect_good(tensors[rank].ticket); });
}

// Stalls ----------------------------------------------------------------------------------------------

TEST(Stalls, NameTheTensorAndWhoHasItAndWhoHasNot) {
  NegotiationOptions options;
  options.stall_warning = 0.05;
  World world(3, options);
  std::vector<Tensor<float>> tensors(3, Tensor<float>("layer.weight", 5, 1));
  for (int rank : {0, 2}) {
    world.ranks[rank]->set_step(10 + rank);
    tensors[rank].submit(*world.ranks[rank]);
  }
  std::vector<Tensor<float>> others(3, Tensor<float>("other", 5, 1));
  world.ranks[1]->set_step(7);
  others[1].submit(*world.ranks[1]);
  std::set<std::string> names;
  double seconds = 0;
  for (int turn = 0; turn < 4; ++turn) {
    const auto notices = world.ranks[0]->notices(kLong);
    ASSERT_TRUE(notices);
    for (const Notice& notice : *notices) {
      ASSERT_TRUE(notice.stall);
      names.insert(notice.stall->name);
      if (notice.stall->name != "layer.weight") continue;
      EXPECT_EQ(notice.stall->submitted, (std::vector<int>{0, 2}));
      EXPECT_EQ(notice.stall->missing, (std::vector<int>{1}));
      EXPECT_EQ(notice.stall->steps, (std::vector<int64_t>{10, 7, 12}));
      EXPECT_GE(notice.stall->seconds, std::max(0.05, 1.9 * seconds));
      seconds = notice.stall->seconds;
    }
  }
  EXPECT_EQ(names, (std::set<std::string>{"layer.weight", "other"}));
  tensors[1].submit(*world.ranks[1]);
  for (int rank : {0, 2}) others[rank].submit(*world.ranks[rank]);
  for (int rank : {0, 1, 2}) {
    expect_good(tensors[rank].ticket);
    expect_good(others[rank].ticket);
  }
}

TEST(Stalls, OrdersReachTheOtherRanks) {
  World world(3);
  world.ranks[0]->order("dump");
  EXPECT_THROW(world.ranks[1]->order("dump"), std::invalid_argument);
  for (int rank : {1, 2}) {
    const auto notices = world.ranks[rank]->notices(kLong);
    ASSERT_TRUE(notices);
    ASSERT_EQ(notices->size(), 1u);
    EXPECT_EQ((*notices)[0].order, "dump");
    EXPECT_FALSE((*notices)[0].stall);
  }
  EXPECT_TRUE(world.ranks[0]->notices(0)->empty());
}

TEST(Negotiation, SleepsWhileThereIsNothingToDo) {
  World world(2);
  spawn(2, [&](int rank) {
    Tensor<float> tensor("x", 5, 1);
    expect_good(tensor.submit(*world.ranks[rank]));
  });
  const auto used = [] {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
  };
  const double before = used();
  EXPECT_TRUE(world.ranks[0]->notices(0.5)->empty());
  EXPECT_LT(used() - before, 0.1);
}

}  // namespace
}  // namespace dadt::negotiation_test
