// What happens when a rank dies, is silent, aborts, ends early or is somewhere else.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <latch>

#include "ranks.h"

namespace dadt::failure_test {
namespace {

constexpr size_t kSlot = 256;

// Runs `other` as rank 1 in a process of its own, connected with an executor made here as rank 0.
class Peer {
 public:
  explicit Peer(const std::function<void(ShmExecutor&)>& other) {
    int to_child[2], to_parent[2];
    EXPECT_EQ(pipe(to_child), 0);
    EXPECT_EQ(pipe(to_parent), 0);
    pid_ = fork();
    if (pid_ == 0) {
      ShmExecutor executor(1, 2, kSlot);
      exchange(executor, 1, to_parent[1], to_child[0]);
      other(executor);
      _exit(0);
    }
    mine = std::make_shared<ShmExecutor>(0, 2, kSlot);
    exchange(*mine, 0, to_child[1], to_parent[0]);
    for (int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(fd);
  }
  ~Peer() {
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

  std::shared_ptr<ShmExecutor> mine;

 private:
  static void exchange(ShmExecutor& executor, int rank, int out, int in) {
    std::vector<std::string> endpoints(2);
    endpoints[rank] = executor.endpoint();
    std::string& other = endpoints[1 - rank];
    other.resize(endpoints[rank].size());
    if (write(out, endpoints[rank].data(), other.size()) != static_cast<ssize_t>(other.size())) _exit(1);
    size_t got = 0;
    while (got < other.size()) {
      const ssize_t n = read(in, other.data() + got, other.size() - got);
      if (n <= 0) _exit(1);
      got += n;
    }
    executor.connect(endpoints, 30);
  }
  pid_t pid_;
};

TEST(Failure, APeerThatHasDiedIsNamed) {
  Peer peer([](ShmExecutor&) {});
  const Error error = caught([&] { peer.mine->run(allgather("x", "end"), 30); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_EQ(error.what(),
            "rank 1 (pid " + std::to_string(peer.pid()) + ") is gone; waited for it in allgather \"end\"");
}

TEST(Failure, APeerThatIsKilledAtWorkIsNamed) {
  Peer peer([](ShmExecutor& executor) {
    while (true) executor.run(allgather(std::string(100'000, 'x')), 30);
  });
  const std::string mine(100'000, 'y');
  for (int turn = 0; turn < 5; ++turn) {
    EXPECT_EQ(peer.mine->run(allgather(mine), 30).lanes[1], std::string(100'000, 'x'));
  }
  kill(peer.pid(), SIGKILL);
  const Error error = caught([&] {
    while (true) peer.mine->run(allgather(mine), 30);
  });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_NE(std::string(error.what()).find("rank 1 (pid "), std::string::npos) << error.what();
}

TEST(Failure, ASilentRankIsNamedAfterTheTimeout) {
  const auto executors = connected(3, kSlot);
  const auto late = [&](int rank) {
    return caught([&] { executors[rank]->run(allgather("x", "end"), 0.2); });
  };
  std::thread second([&] {
    const Error error = late(2);
    EXPECT_EQ(error.code(), Code::kTimeout);
  });
  const Error error = late(0);
  second.join();
  EXPECT_EQ(error.code(), Code::kTimeout);
  EXPECT_STREQ(error.what(), "rank 1 did not come to allgather \"end\" within 0.2 s");
}

TEST(Failure, AnAbortReachesThePeersAsItIs) {
  const auto executors = connected(2, kSlot);
  executors[0]->abort(Error(Code::kMismatch, "the ranks differ"));
  executors[0]->abort(Error(Code::kAborted, "too late to matter"));
  const Error here = caught([&] { executors[0]->run(allgather("x"), 30); });
  const Error there = caught([&] { executors[1]->run(allgather("x"), 30); });
  EXPECT_EQ(here.code(), Code::kMismatch);
  EXPECT_STREQ(here.what(), "the ranks differ");
  EXPECT_EQ(there.code(), Code::kMismatch);
  EXPECT_STREQ(there.what(), "rank 0 gave up: the ranks differ");
}

// By one of its own threads, or by a peer: whoever waits is awake long before the timeout.
TEST(Failure, AnAbortWakesThoseWhoWait) {
  for (int aborter : {0, 2}) {
    for (int turn = 0; turn < 20; ++turn) {
      const auto executors = connected(3, kSlot);
      std::latch started(2);
      const auto start = Clock::now();
      std::vector<std::thread> waiters;
      for (int rank : {0, 1}) {
        waiters.emplace_back([&, rank] {
          started.count_down();
          const Error error = caught([&] { executors[rank]->run(allgather("x"), 600); });
          EXPECT_EQ(error.code(), Code::kAborted);
        });
      }
      started.wait();
      executors[aborter]->abort(Error(Code::kAborted, "stop"));
      for (auto& waiter : waiters) waiter.join();
      EXPECT_LT(seconds_between(start, Clock::now()), 60);
    }
  }
}

TEST(Failure, ARankThatHasEndedIsNamed) {
  const auto executors = connected(2, kSlot);
  executors[1]->close();
  const Error error = caught([&] { executors[0]->run(allgather("x", "end"), 30); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_NE(std::string(error.what()).find(") has ended; waited for it in allgather \"end\""),
            std::string::npos);
}

TEST(Failure, ARankMayLeaveRightAfterItsLastOperation) {
  for (int turn = 0; turn < 50; ++turn) {
    auto executors = connected(3, kSlot);
    spawn(3, [&](int rank) {
      EXPECT_EQ(executors[rank]->run(allgather(std::string(900, 'x')), 30).lanes[2], std::string(900, 'x'));
      executors[rank].reset();
    });
  }
}

void expect_mismatch(const std::function<Operation(int)>& operation, const std::string& part) {
  for (int world_size : {2, 4}) {
    const auto executors = connected(world_size, kSlot);
    spawn(world_size, [&](int rank) {
      const Error error = caught([&] { executors[rank]->run(operation(rank), 30); });
      EXPECT_EQ(error.code(), Code::kMismatch) << error.what();
      if (world_size == 2) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
    });
  }
}

Operation with_layout(Kind kind, DType dtype, std::vector<size_t> counts) {
  Operation operation;
  operation.kind = kind;
  operation.name = "step 3";
  operation.inputs.assign(counts.size(), nullptr);
  operation.outputs.assign(counts.size(), nullptr);
  operation.layout = Layout(dtype, std::move(counts));
  return operation;
}

TEST(Failure, RanksInDifferentOperationsAreNamed) {
  const auto all = Kind::kAllreduce;
  expect_mismatch(
      [&](int rank) { return rank == 1 ? allgather("x", "end") : with_layout(all, DType::kFloat32, {1000}); },
      "rank 0 is in allreduce \"step 3\" of 1000 float32, rank 1 in allgather \"end\": the ranks do not run "
      "the same "
      "steps");
  expect_mismatch([&](int rank) { return with_layout(all, DType::kFloat32, {rank == 1 ? 7u : 8u}); },
                  "of 8 float32, rank 1 in allreduce \"step 3\" of 7 float32");
  expect_mismatch(
      [&](int rank) { return with_layout(all, rank == 1 ? DType::kInt32 : DType::kFloat32, {8}); },
      "of 8 float32, rank 1 in allreduce \"step 3\" of 8 int32");
  expect_mismatch(
      [&](int rank) {
        return with_layout(all, DType::kFloat32,
                           rank == 1 ? std::vector<size_t>{5, 3} : std::vector<size_t>{3, 5});
      },
      "in tensors of another");
  expect_mismatch([&](int rank) { return allgather("x", rank == 1 ? "b" : "a"); },
                  "rank 0 is in allgather \"a\"");
  expect_mismatch(
      [&](int rank) {
        Operation operation = with_layout(Kind::kBroadcast, DType::kFloat32, {8});
        operation.root = rank == 1;
        return operation;
      },
      "from rank 0, rank 1 in broadcast \"step 3\" of 8 float32 from rank 1");
  expect_mismatch(
      [&](int rank) {
        Operation operation = with_layout(all, DType::kFloat32, {8});
        operation.lane = std::string(rank == 1 ? 16 : 24, 'x');
        return operation;
      },
      "with a lane of 24 bytes, rank 1 in allreduce \"step 3\" of 8 float32 with one of 16");
  expect_mismatch(
      [&](int rank) {
        Operation operation = with_layout(all, DType::kFloat32, {8});
        operation.reduction = rank == 1 ? Reduction::kMin : Reduction::kSum;
        return operation;
      },
      "of 8 float32 by sum, rank 1 in allreduce \"step 3\" of 8 float32 by min");
  expect_mismatch([&](int rank) { return allgather("x", std::string(1000, 'n') + (rank == 1 ? "b" : "a")); },
                  "with another end of its long name");
}

TEST(Failure, AnOperationAfterManyIsStillChecked) {
  const auto executors = connected(2, kSlot);
  spawn(2, [&](int rank) {
    for (int turn = 0; turn < 9; ++turn) executors[rank]->run(allgather(std::string(turn * 100, 'x')), 30);
    const Error error = caught([&] { executors[rank]->run(allgather("", rank == 0 ? "a" : "b"), 30); });
    EXPECT_EQ(error.code(), Code::kMismatch);
  });
}

TEST(Connect, NamesTheRanksThatDoNotCome) {
  ShmExecutor one(0, 3, kSlot), two(1, 3, kSlot), three(2, 3, kSlot);
  const Error error = caught([&] { one.connect({one.endpoint(), two.endpoint(), three.endpoint()}, 0.2); });
  EXPECT_EQ(error.code(), Code::kTimeout);
  EXPECT_STREQ(error.what(), "ranks 1, 2 did not come to the start within 0.2 s");
}

TEST(Connect, RefusesWhatIsNoEndpoint) {
  ShmExecutor one(0, 2, kSlot), other(1, 2, 2 * kSlot);
  EXPECT_EQ(caught([&] { one.connect({one.endpoint(), "nonsense"}, 1); }).code(), Code::kComm);
  EXPECT_EQ(caught([&] { one.connect({one.endpoint(), other.endpoint()}, 1); }).code(), Code::kComm);
  EXPECT_THROW(one.connect({one.endpoint()}, 1), std::invalid_argument);
  EXPECT_THROW(ShmExecutor(2, 2), std::invalid_argument);
  EXPECT_THROW(one.run(allgather(""), 1), std::runtime_error);
}

TEST(Connect, ARankThatIsGoneIsNamed) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string endpoint = ShmExecutor(1, 2, kSlot).endpoint();
    _exit(write(ends[1], endpoint.data(), endpoint.size()) == static_cast<ssize_t>(endpoint.size()) ? 0 : 1);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ShmExecutor mine(0, 2, kSlot);
  std::string endpoint(mine.endpoint().size(), ' ');
  ASSERT_EQ(read(ends[0], endpoint.data(), endpoint.size()), static_cast<ssize_t>(endpoint.size()));
  ::close(ends[0]);
  ::close(ends[1]);
  const Error error = caught([&] { mine.connect({mine.endpoint(), endpoint}, 5); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  EXPECT_EQ(error.what(), "cannot connect to rank 1: process " + std::to_string(child) + " is gone");
}

// A forked child (a DataLoader worker) has copies of all of it: they must neither wait nor disturb the
// parent.
TEST(Fork, EverythingIsInertInTheChild) {
  auto executors = connected(2, kSlot);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int rank : {0, 1}) engines.push_back(std::make_unique<Engine>(executors[rank], rank, 2, 30));
  Engine pulled(nullptr, 0, 1, 30);
  auto queued = pulled.submit(allgather("x"));
  auto job = pulled.pull(1);
  auto waiting = engines[0]->submit(allgather("a"));  // its thread waits for rank 1 while the process forks
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    bool refused = false;
    try {
      engines[0]->submit(allgather("b"));
    } catch (const std::runtime_error&) {
      refused = true;
    }
    engines[0]->abort(Error(Code::kAborted, "the child"));
    engines[0]->close(30);
    job.reset();
    queued.reset();
    waiting.reset();
    engines.clear();
    executors.clear();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  auto other = engines[1]->submit(allgather("b"));
  ASSERT_TRUE(waiting->wait(deadline_after(30)));
  EXPECT_EQ(waiting->result().lanes, (std::vector<std::string>{"a", "b"}));
  EXPECT_FALSE(queued->done());
  ASSERT_TRUE(other->wait(deadline_after(30)));
}

}  // namespace
}  // namespace dadt::failure_test
