#include "engine/engine.h"

#include <algorithm>

#include "engine/null.h"
#include "ranks.h"

namespace dadt::engine_test {
namespace {

constexpr size_t kSlot = 256;

// Blocks in `run` until somebody lets it go or aborts.
class Gate final : public Executor {
 public:
  const char* name() const override { return "gate"; }
  std::string endpoint() override { return {}; }
  void connect(const std::vector<std::string>&, double) override {}
  Result run(const Operation& operation, double timeout) override {
    entered = true;
    event.notify();
    event.wait([this] { return open || aborted; }, deadline_after(timeout));
    if (!open) throw Error(Code::kAborted, "the gate was aborted");
    if (operation.name == "bad") throw Error(Code::kPeerLost, "bad is bad");
    if (operation.name == "bug") throw std::runtime_error("a bug");
    names.push_back(operation.name);
    return Result{};
  }
  void abort(const Error&) override {
    aborted = true;
    event.notify();
  }
  void close() override { closed = true; }

  void let_go() {
    open = true;
    event.notify();
  }
  void wait_entered() {
    EXPECT_TRUE(event.wait([this] { return entered.load(); }, deadline_after(30)));
  }

  EventCount event;
  std::atomic<bool> open{false}, aborted{false}, entered{false}, closed{false};
  std::vector<std::string> names;  // engine thread, until joined
};

const Result& finished(const std::shared_ptr<Work>& work) {
  EXPECT_TRUE(work->wait(deadline_after(30))) << work->operation().title();
  return work->result();
}

TEST(Engine, RunsInOrder) {
  auto gate = std::make_shared<Gate>();
  Engine engine(gate, 0, 1, 30);
  std::vector<std::shared_ptr<Work>> works;
  std::vector<std::string> names;
  for (int i = 0; i < 100; ++i) {
    names.push_back(std::to_string(i));
    works.push_back(engine.submit(allgather("", names.back())));
  }
  EXPECT_FALSE(works[0]->done());
  EXPECT_THROW(works[0]->result(), std::runtime_error);
  EXPECT_FALSE(works[0]->wait(deadline_after(0.05)));
  gate->let_go();
  engine.close(30);
  for (const auto& work : works) EXPECT_TRUE(work->done());
  EXPECT_EQ(gate->names, names);
  EXPECT_TRUE(gate->closed);
}

TEST(Engine, WhatIsHeldKeepsItsPlace) {
  auto gate = std::make_shared<Gate>();
  gate->let_go();
  Engine engine(gate, 0, 1, 30);
  auto first = engine.submit(allgather("", "first"));
  auto held = engine.submit(allgather("", "held"), true);
  auto last = engine.submit(allgather("", "last"));
  EXPECT_FALSE(finished(first).error);
  EXPECT_FALSE(last->wait(deadline_after(0.05)));
  EXPECT_FALSE(held->done());
  engine.release(*held);
  engine.close(30);
  EXPECT_EQ(gate->names, (std::vector<std::string>{"first", "held", "last"}));
}

TEST(Engine, WhatIsHeldForEverFailsAsAllElse) {
  Engine engine(std::make_shared<Gate>(), 0, 1, 600);
  auto held = engine.submit(allgather("", "held"), true);
  const Error error = caught([&] { engine.close(0.05); });
  EXPECT_STREQ(error.what(), "allgather \"held\" was not done when the engine closed");
  EXPECT_EQ(finished(held).error->code(), Code::kAborted);
  engine.release(*held);
}

TEST(Engine, TheFirstErrorSticks) {
  auto gate = std::make_shared<Gate>();
  Engine engine(gate, 0, 1, 30);
  auto good = engine.submit(allgather("", "good"));
  auto bad = engine.submit(allgather("", "bad"));
  auto pending = engine.submit(allgather("", "pending"));
  gate->let_go();
  EXPECT_FALSE(finished(good).error);
  for (const auto& work : {bad, pending}) {
    ASSERT_TRUE(finished(work).error);
    EXPECT_STREQ(work->result().error->what(), "bad is bad");
    EXPECT_EQ(work->result().error->code(), Code::kPeerLost);
  }
  auto later = engine.submit(allgather("", "later"));
  ASSERT_TRUE(later->done());
  EXPECT_STREQ(later->result().error->what(), "bad is bad");
  engine.abort(Error(Code::kAborted, "second"));
  EXPECT_STREQ(engine.error()->what(), "bad is bad");
  EXPECT_TRUE(gate->aborted);
  engine.close(30);
}

TEST(Engine, OurOwnBugsAreNotTheWorlds) {
  auto gate = std::make_shared<Gate>();
  gate->let_go();
  Engine engine(gate, 0, 1, 30);
  EXPECT_EQ(finished(engine.submit(allgather("", "bug"))).error->code(), Code::kInternal);
}

TEST(Engine, AbortFailsWhatRunsAndWhatWaits) {
  auto gate = std::make_shared<Gate>();
  Engine engine(gate, 0, 1, 600);
  auto running = engine.submit(allgather("", "running"));
  auto pending = engine.submit(allgather("", "pending"));
  gate->wait_entered();
  engine.abort(Error(Code::kAborted, "enough"));
  for (const auto& work : {running, pending}) {
    EXPECT_STREQ(finished(work).error->what(), "enough");
    EXPECT_EQ(work->result().error->code(), Code::kAborted);
  }
}

TEST(Engine, CloseWaitsForWhatIsPending) {
  auto gate = std::make_shared<Gate>();
  Engine engine(gate, 0, 1, 30);
  auto work = engine.submit(allgather(""));
  std::thread closer([&] { engine.close(30); });
  gate->wait_entered();
  EXPECT_FALSE(engine.closed());
  gate->let_go();
  closer.join();
  EXPECT_TRUE(engine.closed());
  EXPECT_FALSE(finished(work).error);
  EXPECT_THROW(engine.submit(allgather("")), std::runtime_error);
  engine.close(30);
}

TEST(Engine, CloseAbortsWhatIsLateAndSaysSo) {
  auto gate = std::make_shared<Gate>();
  Engine engine(gate, 0, 1, 600);
  auto work = engine.submit(allgather("", "slow"));
  gate->wait_entered();
  const Error error = caught([&] { engine.close(0.05); });
  EXPECT_EQ(error.code(), Code::kTimeout);
  EXPECT_STREQ(error.what(), "allgather \"slow\" was not done when the engine closed");
  EXPECT_EQ(finished(work).error->code(), Code::kAborted);
  EXPECT_TRUE(engine.closed());
}

TEST(Engine, DestructionFailsWhatIsPending) {
  auto gate = std::make_shared<Gate>();
  std::shared_ptr<Work> work;
  {
    Engine engine(gate, 0, 1, 600);
    work = engine.submit(allgather(""));
  }
  EXPECT_EQ(finished(work).error->code(), Code::kAborted);
}

TEST(Engine, RefusesBadOperations) {
  Engine engine(std::make_shared<NullExecutor>(0, 2), 0, 2, 30);
  Operation operation = allgather("");
  operation.weight = -1;
  EXPECT_THROW(engine.submit(operation), std::invalid_argument);
  operation.weight = 1;
  operation.root = 2;
  EXPECT_THROW(engine.submit(operation), std::invalid_argument);
  operation.root = 0;
  operation.layout = Layout(DType::kFloat32, {3});
  EXPECT_THROW(engine.submit(operation), std::invalid_argument);
  operation.kind = Kind::kBroadcast;
  operation.inputs = {nullptr};
  operation.outputs = {nullptr};
  EXPECT_THROW(engine.submit(operation), std::invalid_argument);
  EXPECT_THROW(Engine(nullptr, 0, 1, 0), std::invalid_argument);
  EXPECT_THROW(Engine(nullptr, 1, 1, 1), std::invalid_argument);
}

TEST(Engine, ManyThreadsMaySubmit) {
  Engine engine(std::make_shared<NullExecutor>(0, 1), 0, 1, 30);
  spawn(4, [&](int thread) {
    for (int i = 0; i < 300; ++i) {
      const std::string lane = std::to_string(thread) + "/" + std::to_string(i);
      EXPECT_EQ(finished(engine.submit(allgather(lane))).lanes, std::vector<std::string>{lane});
    }
  });
}

TEST(Engine, RanksExchangeThroughTheirEngines) {
  const auto executors = connected(2, kSlot);
  spawn(2, [&](int rank) {
    Engine engine(executors[rank], rank, 2, 30);
    std::vector<std::vector<std::vector<float>>> tensors;
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 200; ++i) tensors.push_back({std::vector<float>(i, static_cast<float>(rank + i))});
    for (int i = 0; i < 200; ++i) {
      works.push_back(engine.submit(allreduce(DType::kFloat32, tensors[i], tensors[i], std::to_string(i))));
    }
    for (int i = 0; i < 200; ++i) {
      EXPECT_FALSE(finished(works[i]).error);
      EXPECT_EQ(tensors[i][0], std::vector<float>(i, static_cast<float>(i) + 0.5f));
    }
    engine.close(30);
  });
}

TEST(Engine, AnErrorOnOneRankStopsThePeers) {
  const auto executors = connected(2, kSlot);
  Engine one(executors[0], 0, 2, 600), two(executors[1], 1, 2, 600);
  auto waiting = one.submit(allgather("", "a"));
  two.abort(Error(Code::kAborted, "rank 1 had enough"));
  EXPECT_STREQ(finished(waiting).error->what(), "rank 1 gave up: rank 1 had enough");
}

TEST(Pull, APythonExecutorFinishesJobs) {
  Engine engine(nullptr, 0, 2, 30);
  EXPECT_EQ(engine.pull(0.01), nullptr);
  std::vector<std::vector<float>> inputs = {{1, 2}, {}, {3}}, outputs = {{0, 0}, {}, {0}};
  Operation operation = allreduce(DType::kFloat32, inputs, outputs);
  operation.weight = 2;
  operation.lane = "lane";
  operation.inputs[2] = nullptr;
  auto work = engine.submit(operation);
  auto job = engine.pull(30);
  ASSERT_NE(job, nullptr);
  std::vector<float> flat(3, -1);
  job->pack(flat.data());
  EXPECT_EQ(flat, (std::vector<float>{2, 4, 0}));
  EXPECT_THROW(engine.pull(0), std::runtime_error);
  job->unpack(flat.data(), 0.25);
  EXPECT_EQ(outputs[0], (std::vector<float>{0.5, 1}));
  EXPECT_EQ(outputs[2], (std::vector<float>{0}));
  Result result;
  result.weight_sum = 4;
  job->finish(std::move(result));
  EXPECT_EQ(finished(work).weight_sum, 4);
  EXPECT_EQ(caught([&] { job->finish(Result{}); }).code(), Code::kAborted);
  engine.close(1);
  EXPECT_EQ(engine.pull(30), nullptr);
}

TEST(Pull, OutputsMayLieInOneBufferWithGaps) {
  Engine engine(nullptr, 0, 2, 30);
  std::vector<float> flat(8, -1);
  std::vector<std::vector<float>> inputs = {{1, 2}, {3}}, none = {{}, {}};
  Operation operation = allreduce(DType::kFloat32, inputs, none);
  operation.outputs = {&flat[0], &flat[4]};
  operation.flat = flat.data();
  operation.room = 4;
  EXPECT_THROW(engine.submit(operation), std::invalid_argument);  // the second one lies outside
  operation.room = flat.size();
  operation.lane = "lane";
  auto work = engine.submit(operation);
  auto job = engine.pull(30);
  ASSERT_NE(job, nullptr);
  EXPECT_TRUE(job->apart());
  EXPECT_EQ(job->spread_count(), 5u);
  job->pack(flat.data(), 0.5, true);
  EXPECT_EQ(flat, (std::vector<float>{0.5, 1, -1, -1, 1.5, -1, -1, -1}));
  job->unpack(flat.data(), 1, true);
  EXPECT_EQ(flat, (std::vector<float>{0.5, 1, -1, -1, 1.5, -1, -1, -1}));
  job->unpack(flat.data(), 2, true);
  EXPECT_EQ(flat, (std::vector<float>{1, 2, -1, -1, 3, -1, -1, -1}));
  job->finish(Result{});
  finished(work);
  operation.inputs[1] = &flat[4];
  work = engine.submit(operation);
  job = engine.pull(30);
  EXPECT_FALSE(job->apart());
  job->finish(Result{});
  finished(work);
  engine.close(1);
}

TEST(Pull, WhatIsHeldIsNotPulled) {
  Engine engine(nullptr, 0, 2, 30);
  auto held = engine.submit(allgather("", "held"), true);
  EXPECT_EQ(engine.pull(0.01), nullptr);
  engine.release(*held);
  auto job = engine.pull(30);
  ASSERT_NE(job, nullptr);
  job->finish(Result{});
  EXPECT_FALSE(finished(held).error);
}

TEST(Pull, AFailedJobSticks) {
  Engine engine(nullptr, 0, 2, 30);
  auto first = engine.submit(allgather("")), second = engine.submit(allgather(""));
  engine.pull(30)->fail(Error(Code::kComm, "no route"));
  EXPECT_STREQ(finished(first).error->what(), "no route");
  EXPECT_STREQ(finished(second).error->what(), "no route");
}

TEST(Pull, ADroppedJobFails) {
  Engine engine(nullptr, 0, 2, 30);
  auto work = engine.submit(allgather("", "lost"));
  engine.pull(30).reset();
  EXPECT_STREQ(finished(work).error->what(), "allgather \"lost\" was dropped by the executor");
}

TEST(Pull, AbortFailsTheJobAtOnceAndForbidsItsMemory) {
  Engine engine(nullptr, 0, 2, 30);
  std::vector<std::vector<float>> tensors = {{1, 2}};
  auto work = engine.submit(allreduce(DType::kFloat32, tensors, tensors));
  auto job = engine.pull(30);
  engine.abort(Error(Code::kAborted, "enough"));
  EXPECT_TRUE(work->done());
  std::vector<float> flat(2);
  EXPECT_EQ(caught([&] { job->unpack(flat.data(), 1); }).code(), Code::kAborted);
  engine.close(30);
}

}  // namespace
}  // namespace dadt::engine_test
