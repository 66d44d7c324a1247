#include <cmath>
#include <numeric>
#include <random>

#include "engine/null.h"
#include "kernels/number.h"
#include "ranks.h"

namespace dadt::shm_test {
namespace {

constexpr size_t kSmallSlot = 256;  // many chunks with few elements

using Tensors = std::vector<std::vector<float>>;

Tensors random_tensors(const std::vector<size_t>& counts, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Tensors tensors;
  for (size_t count : counts) {
    tensors.emplace_back(count);
    for (float& x : tensors.back()) x = normal(random);
  }
  return tensors;
}

Tensors mean(const std::vector<size_t>& counts, const std::vector<double>& weights) {
  Tensors sum(counts.size());
  double total = 0;
  const bool equal = std::all_of(weights.begin(), weights.end(), [&](double w) { return w == weights[0]; });
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    const float weight = equal ? 1.f : static_cast<float>(weights[rank]);
    total += weight;
    const Tensors mine = random_tensors(counts, static_cast<unsigned>(rank));
    for (size_t i = 0; i < counts.size(); ++i) {
      sum[i].resize(counts[i]);
      for (size_t k = 0; k < counts[i]; ++k) {
        volatile float product = mine[i][k] * weight;  // no contraction, as in the kernels
        sum[i][k] += product;
      }
    }
  }
  for (auto& tensor : sum) {
    for (float& x : tensor) x *= static_cast<float>(1 / total);
  }
  return sum;
}

struct Case {
  int world_size;
  size_t slot_bytes;
  bool in_place;
  bool weighted;
};

class ShmAllreduce : public testing::TestWithParam<Case> {};

TEST_P(ShmAllreduce, IsTheWeightedMeanToTheBit) {
  const auto [world_size, slot_bytes, in_place, weighted] = GetParam();
  const auto executors = connected(world_size, slot_bytes);
  const std::vector<std::vector<size_t>> layouts = {{1},  {0},  {},           {5, 0, 131, 1, 64},
                                                    {63}, {64}, {65, 7, 500}, {10000, 1, 3}};
  for (const auto& counts : layouts) {
    std::vector<double> weights(world_size, 4.0);
    for (int rank = 0; weighted && rank < world_size; ++rank) weights[rank] = rank + 0.5;
    const Tensors want = mean(counts, weights);
    std::vector<Tensors> got(world_size);
    spawn(world_size, [&](int rank) {
      Tensors inputs = random_tensors(counts, rank);
      Tensors outputs = inputs;
      Operation operation = allreduce(DType::kFloat32, in_place ? outputs : inputs, outputs);
      operation.weight = weights[rank];
      operation.lane = std::string(300, static_cast<char>('a' + rank));
      const Result result = executors[rank]->run(operation, 30);
      EXPECT_EQ(result.weight_sum, std::accumulate(weights.begin(), weights.end(), 0.0));
      ASSERT_EQ(result.lanes.size(), static_cast<size_t>(world_size));
      for (int peer = 0; peer < world_size; ++peer) {
        EXPECT_EQ(result.lanes[peer], std::string(300, static_cast<char>('a' + peer)));
      }
      EXPECT_GE(result.seconds, 0);
      EXPECT_GE(result.waited, 0);
      got[rank] = outputs;
    });
    for (int rank = 0; rank < world_size; ++rank) EXPECT_EQ(got[rank], want) << "rank " << rank;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int world_size : {1, 2, 3, 5, 9, 10}) {  // more than 8 meet twice
    for (size_t slot_bytes : {kSmallSlot, ShmExecutor::kSlotBytes}) {
      for (bool in_place : {false, true}) {
        for (bool weighted : {false, true}) all.push_back({world_size, slot_bytes, in_place, weighted});
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, ShmAllreduce, testing::ValuesIn(thinned(cases())));

template <typename T>
void check_dtype(DType dtype, T one, T three, T two) {
  for (int world_size : {2, 10}) {
    const auto executors = connected(world_size, kSmallSlot);
    spawn(world_size, [&](int rank) {
      std::vector<std::vector<T>> tensors = {std::vector<T>(777, rank % 2 == 0 ? one : three)};
      const Operation operation = allreduce(dtype, tensors, tensors);
      executors[rank]->run(operation, 30);
      for (const T& x : tensors[0]) ASSERT_EQ(std::memcmp(&x, &two, sizeof two), 0) << dtype_name(dtype);
    });
  }
}

TEST(Shm, AveragesEveryDType) {
  check_dtype<float>(DType::kFloat32, 1, 3, 2);
  check_dtype<double>(DType::kFloat64, 1, 3, 2);
  check_dtype<Half>(DType::kFloat16, {0x3c00}, {0x4200}, {0x4000});
  check_dtype<BFloat>(DType::kBFloat16, {0x3f80}, {0x4040}, {0x4000});
  check_dtype<int64_t>(DType::kInt64, 1, 3, 2);
  check_dtype<int32_t>(DType::kInt32, 1, 3, 2);
  check_dtype<int16_t>(DType::kInt16, 1, 3, 2);
  check_dtype<int8_t>(DType::kInt8, 1, 3, 2);
  check_dtype<uint8_t>(DType::kUInt8, 1, 3, 2);
}

TEST(Shm, AbsentInputsAreZerosAndAbsentOutputsUntouched) {
  const auto executors = connected(2, kSmallSlot);
  spawn(2, [&](int rank) {
    Tensors tensors = {std::vector<float>(100, 8), std::vector<float>(100, 6)};
    Operation operation = allreduce(DType::kFloat32, tensors, tensors);
    if (rank == 0) operation.inputs[0] = nullptr;
    if (rank == 1) operation.outputs[1] = nullptr;
    executors[rank]->run(operation, 30);
    EXPECT_EQ(tensors[0], std::vector<float>(100, 4));
    EXPECT_EQ(tensors[1], std::vector<float>(100, 6));
  });
}

TEST(Shm, WeightZeroLeavesARankOut) {
  const auto executors = connected(3, kSmallSlot);
  spawn(3, [&](int rank) {
    Tensors tensors = {std::vector<float>(100, rank == 1 ? NAN : static_cast<float>(rank))};
    Operation operation = allreduce(DType::kFloat32, tensors, tensors);
    operation.weight = rank == 1 ? 0 : 5;
    EXPECT_EQ(executors[rank]->run(operation, 30).weight_sum, 10);
    EXPECT_EQ(tensors[0], std::vector<float>(100, 1));
  });
}

TEST(Shm, AllWeightsZeroCountAsEqual) {
  const auto executors = connected(2, kSmallSlot);
  spawn(2, [&](int rank) {
    Tensors tensors = {std::vector<float>(100, rank == 0 ? 1.f : 3.f)};
    Operation operation = allreduce(DType::kFloat32, tensors, tensors);
    operation.weight = 0;
    executors[rank]->run(operation, 30);
    EXPECT_EQ(tensors[0], std::vector<float>(100, 2));
  });
}

// Rank r has r + 2 at first and then the same times -1; weights as given.
void expect_reduction(int world_size, Reduction reduction, const std::function<double(int)>& weight,
                      float first, float second) {
  const auto executors = connected(world_size, kSmallSlot);
  spawn(world_size, [&](int rank) {
    const float mine = static_cast<float>(rank + 2);
    Tensors tensors = {std::vector<float>(500, mine), std::vector<float>(77, -mine)};
    Operation operation = allreduce(DType::kFloat32, tensors, tensors);
    operation.reduction = reduction;
    operation.weight = weight(rank);
    executors[rank]->run(operation, 30);
    EXPECT_EQ(tensors[0], std::vector<float>(500, first))
        << reduction_name(reduction) << " of " << world_size;
    EXPECT_EQ(tensors[1], std::vector<float>(77, second))
        << reduction_name(reduction) << " of " << world_size;
  });
}

TEST(Shm, EveryReduction) {
  const auto all = [](int) { return 1.0; };
  for (int world_size : {1, 2, 3, 4, 9}) {
    float sum = 0, product = 1, sign = 1;
    for (int rank = 0; rank < world_size; ++rank) {
      sum += static_cast<float>(rank + 2);
      product *= static_cast<float>(rank + 2);
      sign = -sign;
    }
    const float most = static_cast<float>(world_size + 1);
    expect_reduction(world_size, Reduction::kSum, all, sum, -sum);
    expect_reduction(world_size, Reduction::kMin, all, 2, -most);
    expect_reduction(world_size, Reduction::kMax, all, most, -2);
    expect_reduction(world_size, Reduction::kProduct, all, product, sign * product);
    expect_reduction(world_size, Reduction::kSum, [](int) { return 3.0; }, 3 * sum, -3 * sum);
  }
}

TEST(Shm, ReductionsLeaveOutRanksOfWeightZero) {
  const auto first_out = [](int rank) { return rank == 0 ? 0.0 : 2.0; };
  const auto none = [](int) { return 0.0; };
  expect_reduction(3, Reduction::kSum, first_out, 14, -14);
  expect_reduction(3, Reduction::kMin, first_out, 3, -4);
  expect_reduction(3, Reduction::kMax, first_out, 4, -3);
  expect_reduction(9, Reduction::kProduct, [](int rank) { return rank < 2 ? 1.0 : 0.0; }, 6, 6);
  expect_reduction(2, Reduction::kSum, none, 5, -5);
  expect_reduction(2, Reduction::kMin, none, 2, -3);
}

// A reduce-scatter: everybody asks for one tensor of all.
TEST(Shm, EachRankMayTakeAnotherPart) {
  for (int world_size : {2, 4, 9}) {
    const auto executors = connected(world_size, kSmallSlot);
    spawn(world_size, [&](int rank) {
      Tensors tensors(world_size, std::vector<float>(333, static_cast<float>(rank)));
      const Tensors before = tensors;
      Operation operation = allreduce(DType::kFloat32, tensors, tensors);
      operation.reduction = Reduction::kMax;
      for (int other = 0; other < world_size; ++other) {
        if (other != rank) operation.outputs[other] = nullptr;
      }
      executors[rank]->run(operation, 30);
      for (int other = 0; other < world_size; ++other) {
        const float want = static_cast<float>(other == rank ? world_size - 1 : rank);
        EXPECT_EQ(tensors[other], std::vector<float>(333, want));
      }
    });
  }
}

TEST(Shm, LargeLanesTravelInManyChunks) {
  for (int world_size : {2, 9}) {
    const auto executors = connected(world_size, kSmallSlot);
    spawn(world_size, [&](int rank) {
      Tensors tensors = {std::vector<float>(1000, 1)};
      Operation operation = allreduce(DType::kFloat32, tensors, tensors);
      operation.lane = std::string(50001, static_cast<char>('A' + rank));
      const Result result = executors[rank]->run(operation, 30);
      for (int peer = 0; peer < world_size; ++peer) {
        EXPECT_EQ(result.lanes[peer], std::string(50001, static_cast<char>('A' + peer)));
      }
    });
  }
}

TEST(Shm, AllgatherOfUnequalLengths) {
  for (int world_size : {1, 2, 4}) {
    const auto executors = connected(world_size, kSmallSlot);
    const auto data = [](int rank) { return std::string(rank * 12345, static_cast<char>('0' + rank)); };
    for (int turn = 0; turn < 3; ++turn) {
      spawn(world_size, [&](int rank) {
        const Result result = executors[rank]->run(allgather(data(rank)), 30);
        ASSERT_EQ(result.lanes.size(), static_cast<size_t>(world_size));
        for (int peer = 0; peer < world_size; ++peer) EXPECT_EQ(result.lanes[peer], data(peer));
      });
    }
  }
}

TEST(Shm, BroadcastFromAnyRoot) {
  const auto executors = connected(3, kSmallSlot);
  for (int root = 0; root < 3; ++root) {
    spawn(3, [&](int rank) {
      Tensors tensors = random_tensors({1, 0, 777, 64}, rank);
      Operation operation = allreduce(DType::kFloat32, tensors, tensors);
      operation.kind = Kind::kBroadcast;
      operation.root = root;
      EXPECT_TRUE(executors[rank]->run(operation, 30).lanes.empty());
      EXPECT_EQ(tensors, random_tensors({1, 0, 777, 64}, root));
    });
  }
}

TEST(Shm, ManyOperationsOfAllKindsInARow) {
  for (int world_size : {2, 9}) {
    const auto executors = connected(world_size, kSmallSlot);
    spawn(world_size, [&](int rank) {
      std::mt19937 random(7);  // the same choices on all ranks
      for (int turn = 0; turn < 600; ++turn) {
        const size_t count = random() % 400;
        const unsigned kind = random() % 3;
        if (kind == 0) {
          EXPECT_EQ(executors[rank]->run(allgather(std::string(count * rank, 'x')), 30).lanes[1],
                    std::string(count, 'x'));
          continue;
        }
        Tensors tensors = {std::vector<float>(count, static_cast<float>(rank + turn))};
        Operation operation = allreduce(DType::kFloat32, tensors, tensors, std::to_string(turn));
        if (kind == 2) operation.kind = Kind::kBroadcast;
        executors[rank]->run(operation, 30);
        const float want =
            static_cast<float>(turn) + (kind == 2 ? 0 : static_cast<float>(world_size - 1) / 2);
        ASSERT_EQ(tensors[0], std::vector<float>(count, want)) << "turn " << turn;
      }
    });
  }
}

TEST(Null, GivesEveryRankItsOwn) {
  NullExecutor executor(1, 3);
  Tensors inputs = {{1, 2}, {3}}, outputs = {{0, 0}, {0}};
  Operation operation = allreduce(DType::kFloat32, inputs, outputs);
  operation.weight = 2;
  operation.lane = "mine";
  const Result result = executor.run(operation, 1);
  EXPECT_EQ(outputs, inputs);
  EXPECT_EQ(result.weight_sum, 6);
  EXPECT_EQ(result.lanes, std::vector<std::string>(3, "mine"));
}

// In many chunks and in one, with lanes that fill some; what is lost is owed, and the same bits come to all.
TEST(ShmCompressed, IsNearTheMeanAndTheSameOnAllRanks) {
  const std::vector<size_t> counts = {300, 0, 1, 2000};
  for (const size_t slot_bytes : {size_t{576}, size_t{4096}, ShmExecutor::kSlotBytes}) {
    for (const Codec codec :
         {Codec::kBFloat16, Codec::kFloat16, Codec::kInt8, Codec::kInt4, Codec::kBits2, Codec::kBits1}) {
      const int world_size = 3;
      const float near = codec > Codec::kInt4 ? 3.f : codec == Codec::kInt4 ? 0.3f : 0.02f;
      const auto executors = connected(world_size, slot_bytes);
      const Tensors want = mean(counts, {1, 2, 3});
      std::vector<Tensors> got(world_size);
      spawn(world_size, [&](int rank) {
        Tensors inputs = random_tensors(counts, rank);
        std::vector<float> owed(2301);
        got[rank] = inputs;
        Operation operation = allreduce(DType::kFloat32, inputs, got[rank]);
        operation.weight = rank + 1;
        operation.lane = std::string(700, static_cast<char>('a' + rank));
        operation.compression = {codec, owed.data(), 1};
        const Result result = executors[rank]->run(operation, 30);
        EXPECT_EQ(result.lanes[2], std::string(700, 'c'));
        EXPECT_EQ(result.sent, wire_bytes(codec, 2301));
        EXPECT_EQ(result.plain, 2301 * sizeof(float));
        EXPECT_TRUE(std::any_of(owed.begin(), owed.end(), [](float x) { return x != 0; }));
      });
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(got[rank], got[0]);
        for (size_t i = 0; i < counts.size(); ++i) {
          for (size_t k = 0; k < counts[i]; ++k) EXPECT_NEAR(got[rank][i][k], want[i][k], near);
        }
      }
    }
  }
}

// As above, of 16 bits: summed in float32, and rounded once.
TEST(ShmCompressed, ShortFloatsAreNearTheMeanAndTheSameOnAllRanks) {
  using Shorts = std::vector<std::vector<BFloat>>;
  const std::vector<size_t> counts = {300, 0, 1, 2000};
  const int world_size = 3;
  const auto executors = connected(world_size, 4096);
  const Tensors want = mean(counts, {1, 2, 3});
  std::vector<Shorts> got(world_size);
  spawn(world_size, [&](int rank) {
    const Tensors values = random_tensors(counts, static_cast<unsigned>(rank));
    Shorts inputs(counts.size());
    for (size_t i = 0; i < counts.size(); ++i) {
      inputs[i].resize(counts[i]);
      for (size_t k = 0; k < counts[i]; ++k) narrow(values[i][k], &inputs[i][k]);
    }
    std::vector<float> owed(2301);
    got[rank] = inputs;
    Operation operation = allreduce(DType::kBFloat16, inputs, got[rank]);
    operation.weight = rank + 1;
    operation.compression = {Codec::kInt8, owed.data(), 1};
    const Result result = executors[rank]->run(operation, 30);
    EXPECT_EQ(result.sent, wire_bytes(Codec::kInt8, 2301));
    EXPECT_EQ(result.plain, 2301 * sizeof(BFloat));
    EXPECT_TRUE(std::any_of(owed.begin(), owed.end(), [](float x) { return x != 0; }));
  });
  for (size_t i = 0; i < counts.size(); ++i) {
    for (size_t k = 0; k < counts[i]; ++k) {
      EXPECT_NEAR(widen(got[0][i][k]), want[i][k], 0.03);
      for (int rank = 1; rank < world_size; ++rank) EXPECT_EQ(got[rank][i][k].bits, got[0][i][k].bits);
    }
  }
}

TEST(ShmCompressed, TellsThatRanksCompressDifferently) {
  const auto executors = connected(2, kSmallSlot * 4);
  spawn(2, [&](int rank) {
    Tensors tensors = random_tensors({10}, rank);
    Operation operation = allreduce(DType::kFloat32, tensors, tensors);
    operation.compression.codec = rank == 0 ? Codec::kInt8 : Codec::kFloat16;
    const Error error = caught([&] { executors[rank]->run(operation, 30); });
    EXPECT_EQ(error.code(), Code::kMismatch);
    EXPECT_NE(std::string(error.what()).find("as int8, rank 1 in"), std::string::npos) << error.what();
  });
}

}  // namespace
}  // namespace dadt::shm_test
