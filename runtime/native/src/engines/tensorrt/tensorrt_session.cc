// A session of the TensorRT engine.
//
// A session makes one allocation on the device. It contains the inputs, the outputs, the cache rows
// that the last pass computed (`present`), the cache rows that passes read (`past`) and TensorRT's
// working memory. The addresses never change, so a pass can be replayed as a CUDA graph. For each
// pass, the session copies the inputs from pinned host memory to the device, and the candidates
// (the most likely tokens) back to pinned host memory. It draws tokens on the device, and copies
// logits only if a request needs them. The host waits for the device once per pass.
//
// Self-conditioning stays on the device. Before a pass, the session copies the output of the last
// pass to the input, or fills the input with zeros. Both are part of the CUDA graph of the pass.
#include <algorithm>
#include <cstring>
#include <list>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engines/cuda/device_cache.h"
#include "engines/tensorrt/tensorrt_engine.h"

namespace dlm::trt {
namespace {

// The sizes of a pass, and whether the pass uses the self-conditioning of the last pass. Passes
// with the same key replay the same CUDA graph.
struct PassKey {
  int32_t profile, tokens, cached, rows;
  bool has_conditioning;
  bool operator==(const PassKey& other) const {
    return profile == other.profile && tokens == other.tokens && cached == other.cached &&
           rows == other.rows && has_conditioning == other.has_conditioning;
  }
};

class Session final : public Context {
 public:
  // The device's context must be current when the constructor is called.
  explicit Session(TensorRt& engine)
      : engine_(engine),
        cuda_(engine.device().cuda()),
        stream_(create_stream(cuda_)),
        offsets_(lay_out_device(engine)),
        staging_offsets_(lay_out_staging(engine)),
        memory_(cuda_, CudaMemory::Kind::device, offsets_.back()),
        staging_(cuda_, CudaMemory::Kind::pinned, staging_offsets_.back()),
        draws_(engine.draw_kernel()),
        cache_(cuda_, engine.graph().cache) {
    std::vector<DeviceCache::Place> places;
    for (size_t i = 0; i < 2 * engine.graph().cache.size(); ++i)  // one tensor of keys and one of
                                                                  // values per layer
      places.push_back({input(kFirstPast + i), output(kFirstPresent + i)});
    cache_.place(std::move(places));
    for (int32_t profile = 0; profile < 2; ++profile) any_size_[profile] = create_context(profile);
    synchronize();
  }

  ~Session() override {
    current_.emplace(engine_.device(), std::nothrow);
    cuda_.cuStreamSynchronize(stream_.get());
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void run(const Pass& pass, CacheUse use, bool has_conditioning) override {
    const CudaDevice::Use current(engine_.device());
    check_pass(pass);
    const EngineSpec& spec = engine_.spec();
    PassKey key{choose_profile(spec, pass.tokens, pass.cached), pass.tokens, pass.cached, 0,
                has_conditioning};
    if (key.profile < 0 || pass.batch > engine_.max_batch() ||
        pass.rows > engine_.max_rows(pass.tokens, pass.cached))
      fail(DLM_INTERNAL, "a pass of %d x %d tokens, %d cached and %d rows, but the engine takes %s",
           pass.batch, pass.tokens, pass.cached, pass.rows, engine_.limits().c_str());
    const int32_t conditioned = std::exchange(conditioned_, 0);
    if (has_conditioning && pass.tokens != conditioned)
      fail(DLM_INTERNAL, "a pass of %d tokens with the self-conditioning of %d", pass.tokens,
           conditioned);
    key.rows =
        rows_bucket(pass.rows, pass.tokens, (key.profile == 0 ? spec.prefill : spec.block).rows);
    engine_.forget_errors();
    cache_.begin(pass, use);
    fill_staging(pass, key.rows);
    launch(key);
    const size_t rows = pass.rows, top_k = engine_.graph().top_k;
    if (pass.logits != nullptr) {
      const size_t bytes = rows * engine_.graph().vocab_size * sizeof *pass.logits;
      cuda_.check(cuda_.cuMemcpyDtoHAsync_v2(pass.logits, output(kLogits), bytes, stream_.get()),
                  "cuMemcpyDtoHAsync");
    }
    if (pass.draws != nullptr)
      draws_.queue(pass, output(kLogits), engine_.graph().top_k, stream_.get());
    synchronize();
    const auto take = [&](Staged part, auto* to, size_t count) {
      std::memcpy(to, staging_.host(staging_offsets_[part]), count * sizeof *to);
    };
    take(kTokens, pass.top_tokens, rows * top_k);
    take(kProbs, pass.top_probs, rows * top_k);
    take(kLogOdds, pass.top_log_odds, rows * top_k);
    if (pass.entropy != nullptr) take(kEntropies, pass.entropy, rows);
    check_finite(pass.top_probs, rows * top_k);
    if (pass.draws != nullptr) draws_.take(pass);
    cache_.end(pass, use);
    conditioned_ = pass.rows;
  }

  void keep_outside(int32_t first, int32_t last) override {
    const CudaDevice::Use current(engine_.device());
    cache_.keep_outside(first, last, stream_.get());
  }

  uint64_t cache_bytes() const override { return cache_.bytes(); }

 private:
  // A PassKey that occurs repeatedly. The first pass with these sizes runs on the
  // execution context of a profile, which can run all sizes of the profile. For the second pass,
  // the session creates an execution context for these sizes only. From the third pass on, the
  // session replays a CUDA graph.
  //
  // Each graph needs its own execution context. A captured graph refers to its execution context,
  // and must not be used after this context has changed. Execution contexts may share working
  // memory (section "CUDA Graphs" of TensorRT's developer guide).
  struct Repeated {
    PassKey key;
    // The execution context for these sizes. The session creates it for the second pass with these
    // sizes.
    std::unique_ptr<nvinfer1::IExecutionContext> context;
    CudaGraphExec graph;  // nullptr if no graph was captured
  };
  // Each Repeated object has an execution context, which uses host memory. So the number of objects
  // is limited.
  static constexpr size_t kMostRepeated = 32;

  // The parts of the staging memory (pinned host memory for copies): the first three inputs of the
  // graph, then the outputs before `logits`, then the input `temperature` if the denoiser has
  // self-conditioning.
  enum Staged : size_t {
    kIds,
    kPositions,
    kRows,
    kTokens,
    kProbs,
    kLogOdds,
    kEntropies,
    kTemperatures
  };
  // The index of the graph's output `logits`, which comes after the outputs above.
  static constexpr size_t kLogits = 4;

  static size_t bytes_of(const Port& port, const Largest& sizes) {
    return port.bytes(port.shape(1, sizes.tokens, sizes.cached, sizes.rows, sizes.cached));
  }

  // Lays out the device memory: the inputs, the outputs and the working memory.
  static std::vector<size_t> lay_out_device(const TensorRt& engine) {
    const Largest sizes = largest(engine.spec());
    std::vector<size_t> bytes;
    for (const Port& port : engine.ports().inputs) bytes.push_back(bytes_of(port, sizes));
    for (const Port& port : engine.ports().outputs) bytes.push_back(bytes_of(port, sizes));
    bytes.push_back(std::max(engine.working_bytes(0), engine.working_bytes(1)));
    return lay_out(bytes);
  }

  static std::vector<size_t> lay_out_staging(const TensorRt& engine) {
    const Largest sizes = largest(engine.spec());
    const Ports& ports = engine.ports();
    std::vector<size_t> bytes;
    for (size_t i = 0; i < 3; ++i) bytes.push_back(bytes_of(ports.inputs[i], sizes));
    for (size_t i = 0; i < kLogits; ++i) bytes.push_back(bytes_of(ports.outputs[i], sizes));
    if (engine.graph().conditioning_size > 0)
      bytes.push_back(bytes_of(ports.inputs[conditioning_input(engine.graph()) + 1], sizes));
    return lay_out(bytes);
  }

  // Returns the index of the graph's input `conditioning`. The input `temperature` follows it.
  static size_t conditioning_input(const GraphSpec& graph) {
    return kFirstPast + 2 * graph.cache.size();
  }
  // Returns the index of the graph's output `next_conditioning`.
  static size_t conditioning_output(const GraphSpec& graph) {
    return kFirstPresent + 2 * graph.cache.size();
  }

  CUdeviceptr input(size_t port) const { return memory_.device(offsets_[port]); }
  CUdeviceptr output(size_t port) const {
    return memory_.device(offsets_[engine_.ports().inputs.size() + port]);
  }

  void synchronize() {
    cuda_.check(cuda_.cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
  }

  // Creates an execution context for the profile, and sets the addresses of all tensors. All
  // contexts use the same working memory. This is safe, because they run one after another on the
  // same stream.
  std::unique_ptr<nvinfer1::IExecutionContext> create_context(int32_t profile) {
    auto context = engine_.create_context();
    const size_t working = offsets_.size() - 2;
    context->setDeviceMemoryV2(pointer(memory_.device(offsets_[working])),
                               static_cast<int64_t>(offsets_[working + 1] - offsets_[working]));
    if (!context->setOptimizationProfileAsync(profile, stream_.get()))
      engine_.fail_call("setOptimizationProfileAsync");
    const auto set = [&](const Port& port, CUdeviceptr address) {
      if (!context->setTensorAddress(port.name.c_str(), pointer(address)))
        engine_.fail_call("setTensorAddress(\"" + port.name + "\")");
    };
    const Ports& ports = engine_.ports();
    for (size_t i = 0; i < ports.inputs.size(); ++i) set(ports.inputs[i], input(i));
    for (size_t i = 0; i < ports.outputs.size(); ++i) set(ports.outputs[i], output(i));
    return context;
  }

  static void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

  void set_shapes(nvinfer1::IExecutionContext& context, const PassKey& key) {
    for (const Port& port : engine_.ports().inputs)
      if (!context.setInputShape(port.name.c_str(),
                                 dims_of(port, key.tokens, key.cached, key.rows)))
        engine_.fail_call("setInputShape(\"" + port.name + "\")");
  }

  // Copies the inputs of the pass to the staging memory. If the pass scores fewer than `rows` rows,
  // fills up with the first scored row.
  void fill_staging(const dlm_pass& pass, int32_t rows) {
    // Copies `given` numbers, and repeats the first of them until there are `count` numbers.
    const auto put = [&](Staged part, const auto* from, int32_t given, int32_t count) {
      std::byte* const to = staging_.host(staging_offsets_[part]);
      std::memcpy(to, from, given * sizeof *from);
      for (int32_t i = given; i < count; ++i)
        std::memcpy(to + i * sizeof *from, from, sizeof *from);
    };
    put(kIds, pass.input_ids, pass.tokens, pass.tokens);
    put(kPositions, pass.position_ids, pass.tokens, pass.tokens);
    put(kRows, pass.score_rows, pass.rows, rows);
    if (engine_.graph().conditioning_size > 0)
      put(kTemperatures, pass.temperature, pass.rows, rows);
  }

  // Queues all work of a pass on the stream. CUDA can capture this work as one graph.
  void enqueue(nvinfer1::IExecutionContext& context, const PassKey& key) {
    const size_t tokens = key.tokens, rows = key.rows, candidates = rows * engine_.graph().top_k;
    const auto put = [&](Staged part, CUdeviceptr to, size_t bytes) {
      cuda_.check(cuda_.cuMemcpyHtoDAsync_v2(to, staging_.host(staging_offsets_[part]), bytes,
                                             stream_.get()),
                  "cuMemcpyHtoDAsync");
    };
    const auto take = [&](Staged part, size_t bytes) {
      cuda_.check(cuda_.cuMemcpyDtoHAsync_v2(staging_.host(staging_offsets_[part]),
                                             output(part - kTokens), bytes, stream_.get()),
                  "cuMemcpyDtoHAsync");
    };
    put(kIds, input(kIds), tokens * sizeof(int64_t));
    put(kPositions, input(kPositions), tokens * sizeof(int64_t));
    put(kRows, input(kRows), rows * sizeof(int64_t));
    if (const GraphSpec& graph = engine_.graph(); graph.conditioning_size > 0) {
      const size_t port = conditioning_input(graph);
      put(kTemperatures, input(port + 1), rows * sizeof(float));
      condition(input(port), tokens * graph.conditioning_size * sizeof(float),
                key.has_conditioning);
    }
    if (!context.enqueueV3(stream_.get())) engine_.fail_call("enqueueV3");
    take(kTokens, candidates * sizeof(int32_t));
    take(kProbs, candidates * sizeof(float));
    take(kLogOdds, candidates * sizeof(float));
    take(kEntropies, rows * sizeof(float));
  }

  // Queues a copy of the self-conditioning that the last pass returned, or zeros.
  void condition(CUdeviceptr to, size_t bytes, bool has_conditioning) {
    if (has_conditioning)
      cuda_.check(cuda_.cuMemcpyDtoDAsync_v2(to, output(conditioning_output(engine_.graph())),
                                             bytes, stream_.get()),
                  "cuMemcpyDtoDAsync");
    else
      cuda_.check(cuda_.cuMemsetD8Async(to, 0, bytes, stream_.get()), "cuMemsetD8Async");
  }

  void launch(const PassKey& key) {
    for (auto known = repeated_.begin(); known != repeated_.end(); ++known) {
      if (!(known->key == key)) continue;
      repeated_.splice(repeated_.begin(), repeated_, known);
      if (known->graph != nullptr) {
        cuda_.check(cuda_.cuGraphLaunch(known->graph.get(), stream_.get()), "cuGraphLaunch");
      } else if (known->context != nullptr) {
        enqueue(*known->context, key);
      } else {
        repeat(*known);
      }
      return;
    }
    set_shapes(*any_size_[key.profile], key);
    enqueue(*any_size_[key.profile], key);
    if (repeated_.size() == kMostRepeated) repeated_.pop_back();
    repeated_.push_front({key, nullptr, CudaGraphExec(nullptr, CudaDelete{&cuda_})});
  }

  // Runs a pass whose PassKey occurs for the second time. Creates an execution context, runs the
  // pass on it once, and then captures it. The first run of a context with new shapes does work
  // that must not be captured.
  void repeat(Repeated& known) {
    auto context = create_context(known.key.profile);
    set_shapes(*context, known.key);
    enqueue(*context, known.key);
    known.context = std::move(context);
    capture(known);
  }

  // Captures a pass as a CUDA graph. If the pass cannot be captured, known.graph stays empty, and
  // the pass runs without a graph.
  void capture(Repeated& known) {
    // In this mode, the CUDA calls of other threads do not affect the capture.
    if (cuda_.cuStreamBeginCapture_v2(stream_.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) !=
        CUDA_SUCCESS)
      return;
    bool is_whole = true;
    try {
      enqueue(*known.context, known.key);
    } catch (...) {  // the capture must end even if an error is thrown
      is_whole = false;
    }
    CUgraph captured = nullptr;
    const CUresult ended = cuda_.cuStreamEndCapture(stream_.get(), &captured);
    const CudaGraph graph(captured, CudaDelete{&cuda_});
    CUgraphExec ready = nullptr;
    if (ended != CUDA_SUCCESS || !is_whole || captured == nullptr) return;
    if (cuda_.cuGraphInstantiateWithFlags(&ready, captured, 0) == CUDA_SUCCESS)
      known.graph.reset(ready);
  }

  TensorRt& engine_;
  const Cuda& cuda_;
  // The destructor sets this member, so that the device's context is current while the members
  // below are destroyed.
  std::optional<CudaDevice::Use> current_;
  CudaStream stream_;  // the stream is freed after the members below
  const std::vector<size_t> offsets_, staging_offsets_;
  const CudaMemory memory_, staging_;
  DeviceDraws draws_;
  DeviceCache cache_;
  // The number of rows for which the last pass returned self-conditioning.
  int32_t conditioned_ = 0;
  std::unique_ptr<nvinfer1::IExecutionContext> any_size_[2];  // one per profile
  std::list<Repeated> repeated_;  // the most recently used pass comes first
};

}  // namespace

std::unique_ptr<Context> open_session(TensorRt& engine) {
  const CudaDevice::Use current(engine.device());
  return std::make_unique<Session>(engine);
}

}  // namespace dlm::trt
