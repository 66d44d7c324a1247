#include "engine/timeline.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "engine/null.h"
#include "ranks.h"

namespace dadt::timeline_test {
namespace {

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) all.push_back(line);
  return all;
}

struct Span {
  std::string category, name;
  long long begin, end;  // ns
};

// Spans of one track, in the order that they were added.
std::vector<Span> spans(const std::string& text, int track) {
  const char* shape =
      R"({"ts":%lld.%3lld,"dur":%lld.%3lld,"ph":"X","pid":%*d,"tid":%d,"cat":"%31[^"]","name":"%255[^"]")";
  std::vector<Span> all;
  for (const std::string& line : lines(text)) {
    long long ts[2], dur[2];
    int tid = 0;
    char category[32], name[256];
    if (std::sscanf(line.c_str(), shape, &ts[0], &ts[1], &dur[0], &dur[1], &tid, category, name) != 7)
      continue;
    if (tid != track) continue;
    const long long begin = 1000 * ts[0] + ts[1];
    all.push_back({category, name, begin, begin + 1000 * dur[0] + dur[1]});
  }
  return all;
}

std::vector<std::string> names(const std::vector<Span>& all) {
  std::vector<std::string> result;
  for (const Span& span : all) result.push_back(span.name);
  return result;
}

Marks marks(std::initializer_list<int> ms) {
  std::vector<Clock::time_point> at;
  for (int each : ms)
    at.push_back(each < 0 ? Clock::time_point{} : Clock::time_point(std::chrono::milliseconds(each)));
  return {at[0], at[1], at[2], at[3], at[4]};
}

using Names = std::vector<std::string>;

TEST(Timeline, StagesFollowOneAnotherWithinTheOperation) {
  Timeline timeline(3, Clock::time_point(std::chrono::milliseconds(1000)));
  timeline.operation(4, allgather("xyz", "a \"name\""), marks({1010, 1020, 1030, 1040, 1050}), {});
  const std::string text = timeline.drain(0);
  EXPECT_NE(text.find(R"("name":"a \"name\"","args":{"bytes":3})"), std::string::npos) << text;
  const auto all = spans(text, 4);
  EXPECT_EQ(names(all), (Names{R"(a \)", "pack", "exchange", "unpack"}));  // the pattern ends at a quote
  EXPECT_EQ(all[1].begin, 20'000'000);
  EXPECT_EQ(all[1].end, all[2].begin);
  EXPECT_EQ(all[2].end, all[3].begin);
  EXPECT_EQ(all[3].end, all[0].end);
  EXPECT_EQ(all[0].end, 50'000'000);
  EXPECT_EQ(lines(text)[0].find(R"({"ts":10000.000,"ph":"b","pid":3,"tid":2,"cat":"queue","id":"3.1")"), 0u)
      << text;
  EXPECT_EQ(timeline.drain(0), "");
}

TEST(Timeline, SaysNothingOfStagesThatAreNotKnown) {
  Timeline timeline(0, Clock::time_point{});
  Result result;
  result.waited = 0.004;
  timeline.operation(4, allgather("", "a"), marks({10, 20, -1, -1, 50}), result);
  const auto all = spans(timeline.drain(0), 4);
  EXPECT_EQ(names(all), (Names{"a", "wait", "exchange"}));
  EXPECT_EQ(all[1].end - all[1].begin, 4'000'000);
}

TEST(Timeline, AnEventBeforeTheOriginIsNegative) {
  Timeline timeline(0, Clock::time_point(std::chrono::microseconds(1500)));
  timeline.step(1, Clock::time_point(std::chrono::nanoseconds(1499'001)),
                Clock::time_point(std::chrono::microseconds(1501)), {});
  EXPECT_EQ(timeline.drain(0).find(R"({"ts":-0.999,"dur":1.999,)"), 0u);
}

TEST(Timeline, AStepIsComputeAndExposedWaits) {
  Timeline timeline(0, Clock::time_point{});
  const auto at = [](int ms) { return Clock::time_point(std::chrono::milliseconds(ms)); };
  timeline.step(7, at(10), at(20), {{"bucket 0", at(12), at(13)}, {"bucket 1", at(13), at(15)}});
  const std::string text = timeline.drain(0);
  EXPECT_EQ(names(spans(text, 1)), (Names{"step 7", "compute", "exposed wait", "exposed wait", "compute"}));
  EXPECT_NE(text.find(R"({"step":7,"compute_us":7000.000,"exposed_wait_us":3000.000})"), std::string::npos)
      << text;
  EXPECT_NE(text.find(R"({"step":7,"for":"bucket 1"})"), std::string::npos) << text;
}

TEST(Timeline, TheEngineRecordsWhatItsExecutorRuns) {
  auto timeline = std::make_shared<Timeline>(0, Clock::now());
  Engine engine(std::make_shared<NullExecutor>(0, 1), 0, 1, 30);
  EXPECT_TRUE(engine.submit(allgather("", "before"))->wait(deadline_after(30)));
  engine.record(timeline, 4);
  EXPECT_EQ(engine.timeline(), timeline.get());
  EXPECT_THROW(engine.record(timeline, 4), std::runtime_error);
  EXPECT_TRUE(engine.submit(allgather("", "after"))->wait(deadline_after(30)));
  EXPECT_EQ(names(spans(timeline->drain(0), 4)), (Names{"after", "exchange"}));
}

TEST(Timeline, APulledJobHasItsStages) {
  auto timeline = std::make_shared<Timeline>(0, Clock::now());
  Engine engine(nullptr, 0, 1, 30);
  engine.record(timeline, 4);
  std::vector<std::vector<float>> tensors{{1, 2}, {3}};
  engine.submit(allreduce(DType::kFloat32, tensors, tensors, "good"));
  {
    const auto job = engine.pull(30);
    float flat[3];
    job->pack(flat);
    job->unpack(flat, 1);
    job->finish({});
  }
  engine.submit(allgather("", "bad"));
  engine.pull(30)->fail(Error(Code::kPeerLost, "rank 1 is gone"));
  const std::string text = timeline->drain(0);
  const auto all = spans(text, 4);
  EXPECT_EQ(names(all), (Names{"good", "pack", "exchange", "unpack", "bad", "exchange"}));
  for (int i = 2; i < 4; ++i) EXPECT_EQ(all[i - 1].end, all[i].begin);
  EXPECT_NE(text.find(R"("tensors":2)"), std::string::npos) << text;
  EXPECT_NE(text.find(R"("error":"rank 1 is gone")"), std::string::npos) << text;
}

TEST(Timeline, MemoryIsBounded) {
  Timeline timeline(0, Clock::time_point{});
  const auto now = Clock::now();
  for (size_t i = 0; i < Timeline::kMost; ++i) timeline.negotiated("tensor", now, now);
  EXPECT_EQ(timeline.dropped(), Timeline::kMost);
  EXPECT_EQ(lines(timeline.drain(30)).size(), Timeline::kMost);
  timeline.negotiated("tensor", now, now);
  EXPECT_EQ(lines(timeline.drain(0)).size(), 2u);
}

TEST(Timeline, DrainsWhileOthersAdd) {
  Timeline timeline(0, Clock::time_point{});
  constexpr size_t kEach = Timeline::kMost / 4;
  size_t drained = 0;
  std::thread reader([&] {
    while (drained + timeline.dropped() < 6 * kEach) drained += lines(timeline.drain(0.01)).size();
  });
  spawn(3, [&](int) {
    for (size_t i = 0; i < kEach; ++i) timeline.negotiated("tensor", {}, {});
  });
  reader.join();
  EXPECT_EQ(drained + timeline.dropped(), 6 * kEach);
}

TEST(Timeline, CloseEndsAWaitingDrain) {
  Timeline timeline(0, Clock::time_point{});
  std::thread reader([&] { timeline.drain(3600); });
  timeline.close();
  reader.join();
}

TEST(Timeline, AForkedChildCanDestroyIt) {
  auto timeline = std::make_unique<Timeline>(0, Clock::time_point{});
  std::thread reader([&] { timeline->drain(3600); });
  const pid_t child = fork();
  if (child == 0) {
    timeline.reset();
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  timeline->close();
  reader.join();
}

}  // namespace
}  // namespace dadt::timeline_test
