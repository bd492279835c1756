// The engine that runs a bundle's graph with ONNX Runtime.
//
// The graph is untrusted. When the engine opens the graph, it compares the graph's inputs and
// outputs with the manifest. In each pass, the engine gives ONNX Runtime a buffer of the right
// shape for every output, so ONNX Runtime writes only to these buffers.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engines/cuda/cuda_api.h"
#include "engines/cuda/device_cache.h"
#include "engines/cuda/device_memory.h"
#include "engines/engine.h"
#include "engines/graph_check.h"
#include "engines/onnxruntime/captured_pass.h"
#include "engines/onnxruntime/custom_op.h"
#include "engines/onnxruntime/drawing_passes.h"
#include "engines/onnxruntime/ort_api.h"
#include "engines/onnxruntime/ort_handles.h"
#include "engines/onnxruntime/ort_library.h"
#include "engines/onnxruntime/ort_provider.h"
#include "engines/onnxruntime/row_choice.h"
#include "kernels/kernels.h"

namespace dlm {
namespace {

// Returns true if a message says that a device has run out of memory. ONNX Runtime's memory arena
// and CUDA write such messages.
bool is_out_of_memory(const std::string& message) {
  const char* const signs[] = {"Failed to allocate memory", "Available memory of", "out of memory"};
  return std::any_of(std::begin(signs), std::end(signs),
                     [&](const char* sign) { return message.find(sign) != std::string::npos; });
}

// ---- Passes ----

// The inputs and outputs of one pass.
struct Values {
  // Owns the OrtValues in `inputs` and `outputs`.
  std::deque<Owned<OrtValue, ort::ReleaseValue>> owned;
  std::vector<OrtValue*> inputs, outputs;
  std::vector<const char*> output_names;
};

constexpr int kNotCaptured = -1;  // the number of ONNX Runtime for passes without a CUDA graph

class OnnxRuntime final : public HostEngine {
 public:
  OnnxRuntime(const GraphSpec& graph, const std::string& library, int threads,
              const ProviderChoice& provider, const Log& log)
      : HostEngine(graph.cache, graph.is_in_order),
        log_(log),
        graph_(graph),
        path_(provider.is_gpu() && !graph.device_path.empty() ? graph.device_path : graph.path),
        provider_(find_provider(provider.name)),
        library_(load_onnxruntime(library, provider)),
        env_(api()),
        memory_(api()),
        device_memory_(api()),
        session_(api()),
        ports_(list_ports(graph, kB)) {
    set(api().call<ort::CreateEnv>(ort::kLogFatal, "dlm", env_.out()));
    set(api().call<ort::CreateCpuMemoryInfo>(ort::kDeviceAllocator, ort::kMemTypeDefault,
                                             memory_.out()));
    open_session(threads, provider);
    chooses_rows_ = has_input(graph_.ports.cached_rows);
    if (provider.cuda_graphs && (!chooses_rows_ || has_window_))
      throw Error(DLM_UNSUPPORTED,
                  path_ +
                      ": CUDA graphs need a bundle that was built with --target cuda, and a "
                      "denoiser without a window in cached layers (cuda_graphs)");
    if (device_) drawing_.emplace(*device_, log);
    if (device_ && provider.cuda_graphs) captured_.emplace(*device_, graph_);
    if (chooses_rows_)
      for (const std::string& name : list_names(graph_.ports, has_window_))
        ports_.inputs.push_back({name, kInt64, {kR}});
    verify_ports<ort::SessionGetInputCount, ort::SessionGetInputName, ort::SessionGetInputTypeInfo>(
        "input", ports_.inputs);
    verify_ports<ort::SessionGetOutputCount, ort::SessionGetOutputName,
                 ort::SessionGetOutputTypeInfo>("output", ports_.outputs);
    has_segments_ = find_segments();
    for (const Port& port : ports_.inputs) input_names_.push_back(port.name.c_str());
    // The segments are the last inputs, so that a pass can omit them.
    input_names_.push_back(graph_.ports.segments.c_str());
    input_names_.push_back(graph_.ports.window_segments.c_str());
  }

  ~OnnxRuntime() override {
    if (!device_) return;
    const CudaDevice::Use use(*device_, std::nothrow);
    captured_.reset();
    drawing_.reset();
  }
  OnnxRuntime(const OnnxRuntime&) = delete;
  OnnxRuntime& operator=(const OnnxRuntime&) = delete;

  std::string description() const override {
    const std::string name = "onnxruntime " + library_.version;
    if (!device_) return name + " (CPU" + (kernels_.empty() ? "" : ", ") + kernels_ + ")";
    return name + " (" + provider_->label + ", " + device_->name() + ", SM " +
           sm_text(device_->sm()) + (left_.empty() ? "" : "; not run there: " + left_) + ")";
  }

  std::unique_ptr<Context> open_context(int32_t longest) override {
    return device_ ? open_device_context(*this, *device_, cache_, longest)
                   : HostEngine::open_context(longest);
  }

  // The input "segments" works only with our kernels. Without our kernels, ONNX Runtime computes
  // attention with the standard operators in the graph. The standard operators ignore segments, so
  // every request would see the rows of all requests.
  bool takes_segments() const override {
    return chooses_rows_ || (has_segments_ && !kernels_.empty());
  }

  // ONNX Runtime's RotaryEmbedding refuses passes with more tokens than its table has rows.
  // graph/row_choice.py of the exporter makes tables of this size.
  int32_t most_shared_tokens(int32_t longest) const override {
    const int64_t rows = chooses_rows_ ? int64_t{2} * longest : INT32_MAX;
    return static_cast<int32_t>(std::min<int64_t>(rows, INT32_MAX));
  }

  bool draws() const override { return drawing_ && drawing_->is_ready(); }

  void run(const Pass& pass, const std::vector<Segment>& segments,
           const WindowRows& window) override {
    check_pass(pass);
    RowChoice chosen;
    if (chooses_rows_) chosen = choose_rows(pass, segments, window, window_of(cache_));
    // ONNX Runtime cannot run two passes of a session with CUDA graphs at the same time.
    std::unique_lock<std::mutex> lock(capturing_, std::defer_lock);
    if (captured_) lock.lock();
    const auto run_any = [&](const Pass& one) {
      run_arrays(one, segments, window, Lists(chosen), memory_.get(), kNotCaptured);
      check_results(one);
    };
    const bool is_captured =
        captured_ && pass.batch == 1 && pass.logits == nullptr && graph_.conditioning_size == 0;
    if (pass.draws != nullptr)
      drawing_->run(pass, graph_.top_k, run_any);
    else if (!is_captured || !run_captured(pass, chosen))
      run_any(pass);
  }

 protected:
  std::unique_ptr<RowMemory> make_row_memory() override {
    return device_ ? make_device_memory(*device_) : HostEngine::make_row_memory();
  }

 private:
  const ort::Api& api() const { return library_.api; }

  // The names of the graph's inputs for a RowChoice.
  static std::vector<std::string> list_names(const PortNames& ports, bool has_window) {
    std::vector<std::string> names = {ports.cached_rows, ports.cached_requests,
                                      ports.token_requests};
    if (has_window)
      names.insert(names.end(), {ports.window_rows, ports.window_requests, ports.window_distances});
    return names;
  }

  // The addresses and sizes of the lists of a RowChoice, in the order of list_names().
  struct Lists {
    explicit Lists(const RowChoice& chosen) {
      for (const std::vector<int64_t>* const list :
           {&chosen.full.rows, &chosen.full.requests, &chosen.of_tokens, &chosen.window.rows,
            &chosen.window.requests, &chosen.distances}) {
        data.push_back(list->data());
        sizes.push_back(list->size());
      }
    }
    std::vector<const void*> data;
    std::vector<size_t> sizes;
  };

  void check_results(const Pass& pass) const {
    check_finite(pass.top_probs, static_cast<size_t>(pass.batch) * pass.rows * graph_.top_k);
  }

  // Runs a pass with the CUDA graph of its shape. The first pass of a shape captures the graph.
  // Returns false if no more graphs can be captured.
  bool run_captured(const Pass& pass, RowChoice chosen) {
    const CudaDevice::Use use(*device_);
    Pass padded = pass;
    CapturedPass* const captured = captured_->find(padded, chosen);
    if (captured == nullptr) return false;
    captured->upload(pass, chosen);
    Lists lists(chosen);
    for (int i = 0; i < 3; ++i) lists.data[i] = captured->device_list(i);
    run_arrays(captured->on_device(padded), {}, {}, lists, device_memory_.get(), captured->id());
    captured->download(pass);
    check_results(pass);
    return true;
  }

  // Runs a pass. Keys and values are in the memory of the context. All other arrays are in `host`,
  // which is the device's memory if the pass is captured. Otherwise, ONNX Runtime copies these
  // arrays. If the pass draws, the logits are in the device's memory too. `graph_id` is the number
  // of the CUDA graph, or kNotCaptured.
  void run_arrays(const Pass& pass, const std::vector<Segment>& segments, const WindowRows& window,
                  const Lists& chosen, const OrtMemoryInfo* host, int graph_id) {
    Values values;
    const OrtMemoryInfo* const cache = device_ ? device_memory_.get() : memory_.get();
    // The C API has no function that makes a read-only tensor from the caller's memory. This cast
    // removes const, which is safe because ONNX Runtime only reads inputs.
    const auto add_input = [&](const Port& port, const void* data, const OrtMemoryInfo* where) {
      values.inputs.push_back(
          tensor(values, pass, window.cached, port, const_cast<void*>(data), where));
    };
    const size_t layers = graph_.cache.size(), conditioning = kFirstPast + 2 * layers,
                 next_conditioning = kFirstPresent + 2 * layers;
    const auto read = [&](size_t port, const void* data) {
      const bool is_cache = port >= kFirstPast && port < conditioning;
      add_input(ports_.inputs[port], data, is_cache ? cache : host);
    };
    const auto write = [&](size_t number, void* data) {
      if (data == nullptr) return;  // NULL: the caller does not need this output
      const Port& port = ports_.outputs[number];
      const bool is_drawn = number == kFirstPresent - 1 && pass.draws != nullptr;
      const bool is_cache = is_drawn || (number >= kFirstPresent && number < next_conditioning);
      values.output_names.push_back(port.name.c_str());
      values.outputs.push_back(
          tensor(values, pass, window.cached, port, data, is_cache ? cache : host));
    };
    read(0, pass.input_ids), read(1, pass.position_ids), read(2, pass.score_rows);
    write(0, pass.top_tokens), write(1, pass.top_probs), write(2, pass.top_log_odds),
        write(3, pass.entropy), write(4, pass.logits);
    for (size_t i = 0; i < layers; ++i) {
      read(kFirstPast + 2 * i, pass.past_keys[i]);
      read(kFirstPast + 2 * i + 1, pass.past_values[i]);
      if (pass.present_keys == nullptr) continue;  // the pass stores no rows
      write(kFirstPresent + 2 * i, pass.present_keys[i]);
      write(kFirstPresent + 2 * i + 1, pass.present_values[i]);
    }
    if (graph_.conditioning_size > 0) {
      read(conditioning, pass.conditioning), read(conditioning + 1, pass.temperature);
      write(next_conditioning, pass.next_conditioning);
    }
    const auto add_list = [&](Port port, const void* data, size_t size) {
      port.dims[0] = static_cast<int64_t>(size);
      add_input(port, data, host);
    };
    if (chooses_rows_) {
      const size_t count = has_window_ ? 6 : 3;
      const Port* const ports = &ports_.inputs[ports_.inputs.size() - count];
      for (size_t i = 0; i < count; ++i) add_list(ports[i], chosen.data[i], chosen.sizes[i]);
    } else if (!segments.empty()) {
      add_list(segments_port(), segments.data(), segments.size());
      if (has_window_) add_list(segments_port(), window.segments.data(), window.segments.size());
    }
    Owned<OrtRunOptions, ort::ReleaseRunOptions> options(api());
    if (captured_) {
      set(api().call<ort::CreateRunOptions>(options.out()));
      set(api().call<ort::AddRunConfigEntry>(options.get(), "gpu_graph_id",
                                             std::to_string(graph_id).c_str()));
    }
    OrtStatus* const reported = api().call<ort::Run>(
        session_.get(), static_cast<const OrtRunOptions*>(options.get()), input_names_.data(),
        values.inputs.data(), values.inputs.size(), values.output_names.data(),
        values.outputs.size(), values.outputs.data());
    if (reported != nullptr)
      check_memory(reported,
                   "a pass of " + std::to_string(pass.batch) + " x " + std::to_string(pass.tokens) +
                       " tokens over " + std::to_string(pass.cached) + " cached ones that scores " +
                       std::to_string(pass.rows) + " rows",
                   "give fewer tokens, a smaller block_length or max_batch");
    check(api(), reported, "a pass of the denoiser failed");
  }

  using SessionOptions = Owned<OrtSessionOptions, ort::ReleaseSessionOptions>;

  void open_session(int threads, const ProviderChoice& provider) {
    SessionOptions options(api());
    set_up(options, threads);
    if (provider.is_gpu()) return open_on_device(options, provider);
    set_up_processor(options);
    check_session(try_session(options));
  }

  void set(OrtStatus* reported) const { check(api(), reported, "setting up ONNX Runtime"); }

  void enable(const SessionOptions& options, const char* key) const {
    set(api().call<ort::AddSessionConfigEntry>(options.get(), key, "1"));
  }

  void set_up(SessionOptions& options, int threads) const {
    set(api().call<ort::CreateSessionOptions>(options.out()));
    // Set the log level of the session, because other code in the process may have set a more
    // verbose level for the OrtEnv, which all sessions share.
    const bool is_logged = log_.on_log != nullptr;
    set(api().call<ort::SetSessionLogSeverityLevel>(options.get(),
                                                    is_logged ? log_.severity : ort::kLogFatal));
    if (is_logged)
      set(api().call<ort::SetUserLoggingFunction>(
          options.get(),
          [](void* log, int severity, const char*, const char*, const char*, const char* message) {
            static_cast<const Log*>(log)->write(severity, message);
          },
          const_cast<Log*>(&log_)));
    // If the number of threads is 0, ONNX Runtime uses all physical cores.
    set(api().call<ort::SetIntraOpNumThreads>(options.get(), threads));
    set(api().call<ort::SetInterOpNumThreads>(options.get(), 1));
    set(api().call<ort::SetSessionExecutionMode>(options.get(), ort::kSequential));
    set(api().call<ort::SetSessionGraphOptimizationLevel>(options.get(), ort::kOptimizeAll));
    // Without this option, the threads of an idle session would keep spinning, and take cores away
    // from other sessions.
    enable(options, "session.force_spinning_stop");
    // Without this option, ONNX Runtime would quantise the activations of INT4 layers to eight
    // bits.
    enable(options, "session.qdq_matmulnbits_accuracy_level");
    // ONNX Runtime would store a memory plan for each combination of sizes, and the sizes of passes
    // change. For a 6-layer denoiser, the plans for 1200 combinations took 10 MB and saved no time.
    // So this code disables memory plans. The memory arena stays enabled, because without it memory
    // use would vary by 20 MB. After the largest pass, the arena does not grow any more.
    set(api().call<ort::DisableMemPattern>(options.get()));
  }

  // Sets up the session for the CPU, with our kernels.
  void set_up_processor(const SessionOptions& options) {
    // Without VNNI, the processor's instruction that adds products of unsigned and signed bytes can
    // saturate. With this option, ONNX Runtime uses unsigned bytes for both factors.
    enable(options, "session.x64quantprecision");
    // Without this option, ONNX Runtime would replace nodes with FP8 operators, although it has no
    // kernels for these operators. With this option, ONNX Runtime dequantises the weights when it
    // loads the graph.
    if (graph_.simulated) enable(options, "session.disable_quant_qdq");
    if (const Kernels* const kernels = find_kernels(); kernels != nullptr) {
      custom_ops_.emplace(api(), *kernels);
      custom_ops_->add_to(options.get());
      kernels_ = kernels->name;
    }
  }

  // Creates a session. When the first session of the process is created, ONNX Runtime adds the
  // domain of our operators to a table that all sessions share. ONNX Runtime changes this table
  // without a lock. If two threads created the first sessions at the same time, one of the calls
  // would fail. So only one session is created at a time, until the first session exists.
  OrtStatus* try_session(const SessionOptions& options) {
    static std::mutex first;
    static std::atomic<const void*> has_domain{nullptr};
    std::unique_lock<std::mutex> lock(first, std::defer_lock);
    if (has_domain != api().table()) lock.lock();
    OrtStatus* const reported =
        api().call<ort::CreateSession>(env_.get(), path_.c_str(), options.get(), session_.out());
    if (reported == nullptr && custom_ops_) has_domain = api().table();
    return reported;
  }

  void check_session(OrtStatus* reported) {
    if (reported != nullptr && access("/proc/self/fd", F_OK) != 0) {
      const std::string said = one_line(api().call<ort::GetErrorMessage>(reported));
      api().call<ort::ReleaseStatus>(reported);
      throw Error(DLM_ENGINE_FAILED,
                  path_ + ": ONNX Runtime " + library_.version +
                      " reads weights through /proc, which is not mounted here. Mount it: `mount "
                      "-t proc proc /proc`, in a chroot or container before the program starts. (" +
                      said + ")");
    }
    check(api(), reported, path_ + ": onnxruntime " + library_.version,
          load_failure(api(), reported));
  }

  // Opens a session on a GPU. Throws an error if nodes would run on the CPU and the caller does not
  // allow this.
  void open_on_device(const SessionOptions& options, const ProviderChoice& provider) {
    check_provider_there(api(), library_.version, *provider_);
    device_.emplace(provider.device);
    add_provider(api(), *provider_, provider, *device_, path_, env_.get(), options.get());
    set(api().call<ort::CreateMemoryInfo>("Cuda", ort::kDeviceAllocator, int{provider.device},
                                          ort::kMemTypeDefault, device_memory_.out()));
    enable(options, kRecordPlacement);
    OrtStatus* const reported = try_session(options);
    if (reported != nullptr)
      check_memory(reported, "the graph with its weights", "use a bundle of a lower precision");
    check_session(reported);
    left_ = left_behind(api(), session_.get(), *provider_);
    if (!provider.allow_fallback && !left_.empty())
      throw Error(DLM_UNSUPPORTED, path_ + ": ONNX Runtime's " + provider_->label +
                                       " provider does not run " + left_ +
                                       ". Build the bundle with --target cuda, or let the CPU run "
                                       "them (allow_fallback)");
  }

  // If the device has run out of memory, releases the status `reported` and throws an error. The
  // caller must handle all other errors.
  void check_memory(OrtStatus* reported, const std::string& what, const std::string& advice) {
    const std::string message = api().call<ort::GetErrorMessage>(reported);
    if (!device_ || !is_out_of_memory(message)) return;
    api().call<ort::ReleaseStatus>(reported);
    const CudaDevice::Use use(*device_);
    const CudaDevice::Memory memory = device_->memory();
    throw Error(DLM_OUT_OF_MEMORY, what + " needs more memory than the device has left, " +
                                       std::to_string(memory.free >> 20) + " of " +
                                       std::to_string(memory.total >> 20) + " MiB: " + advice +
                                       ". " + one_line(message));
  }

  // Compares the graph's ports (inputs or outputs) with the manifest. Throws an error if the graph
  // lacks a port, if the type or shape of a port differs from the manifest, or if the graph has an
  // input that the manifest does not list. Ignores unknown outputs.
  template <class GetCount, class GetName, class GetTypeInfo>
  void verify_ports(const char* kind, std::vector<Port>& ports) {
    ports_of<GetCount, GetName, GetTypeInfo>([&](const std::string& name, const OrtTypeInfo* info) {
      Port* const port = find_port(ports, name);
      if (port != nullptr) return verify_port(kind, *port, info);
      if (&ports == &ports_.inputs)
        refuse_port(path_, kind, name,
                    "is not known to this runtime; the graph was written for a newer one?");
    });
    check_complete(path_, kind, ports);
  }

  void ask(OrtStatus* reported) const { check(api(), reported, path_, DLM_BAD_BUNDLE); }

  // Calls visit(name, info) for each input or each output of the session.
  template <class GetCount, class GetName, class GetTypeInfo, class Visit>
  void ports_of(Visit visit) {
    OrtAllocator* allocator = nullptr;
    size_t count = 0;
    ask(api().call<ort::GetAllocatorWithDefaultOptions>(&allocator));
    ask(api().call<GetCount>(session_.get(), &count));
    for (size_t i = 0; i < count; ++i) {
      char* text = nullptr;
      ask(api().call<GetName>(session_.get(), i, allocator, &text));
      const std::string name = text;
      ask(api().call<ort::AllocatorFree>(allocator, static_cast<void*>(text)));
      Owned<OrtTypeInfo, ort::ReleaseTypeInfo> info(api());
      ask(api().call<GetTypeInfo>(session_.get(), i, info.out()));
      visit(name, info.get());
    }
  }

  // Returns true if the graph has an input with this name, which may be "".
  bool has_input(const std::string& wanted) {
    bool is_found = false;
    ports_of<ort::SessionGetInputCount, ort::SessionGetInputName, ort::SessionGetInputTypeInfo>(
        [&](const std::string& name, const OrtTypeInfo*) {
          is_found = is_found || (name == wanted && !wanted.empty());
        });
    return is_found;
  }

  static Port segments_port(const std::string& name = {}) { return {name, kInt64, {kR, 4}}; }

  // Returns true if the graph has the optional input "segments". If the graph has layers with a
  // window, it must also have the input "window_segments". Throws the same errors as verify_ports.
  bool find_segments() {
    if (graph_.ports.segments.empty() || device_) return false;
    std::vector<Port> ports = {segments_port(graph_.ports.segments)};
    if (has_window_) ports.push_back(segments_port(graph_.ports.window_segments));
    ports_of<ort::SessionGetOptionalInputCount, ort::SessionGetOptionalInputName,
             ort::SessionGetOptionalInputTypeInfo>(
        [&](const std::string& name, const OrtTypeInfo* info) {
          if (Port* const port = find_port(ports, name)) verify_port("input", *port, info);
        });
    check_complete(path_, "input", ports);
    return true;
  }

  void verify_port(const char* kind, Port& port, const OrtTypeInfo* info) const {
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    int type = 0;
    size_t rank = 0;
    ask(api().call<ort::CastTypeInfoToTensorInfo>(info, &tensor));
    if (tensor == nullptr) refuse_port(path_, kind, port.name, "is not a tensor");
    ask(api().call<ort::GetTensorElementType>(tensor, &type));
    ask(api().call<ort::GetDimensionsCount>(tensor, &rank));
    Dims dims(rank);
    ask(api().call<ort::GetDimensions>(tensor, dims.data(), rank));
    note_port(path_, kind, port, type, dims);
  }

  // Makes a tensor that uses the memory at `data`. The tensor has the shape of the port in this
  // pass.
  OrtValue* tensor(Values& values, const dlm_pass& pass, int32_t window_cached, const Port& port,
                   void* data, const OrtMemoryInfo* where) const {
    const auto shape = port.shape(pass.batch, pass.tokens, pass.cached, pass.rows, window_cached);
    const size_t bytes = port.bytes(shape);
    if (data == nullptr && bytes > 0)
      fail(DLM_INTERNAL, "a pass without \"%s\"", port.name.c_str());
    auto& value = values.owned.emplace_back(api());
    OrtStatus* const reported = api().call<ort::CreateTensorWithDataAsOrtValue>(
        where, data, bytes, shape.data(), port.dims.size(), port.type, value.out());
    if (reported != nullptr)
      check(api(), reported, "a pass of the denoiser failed at \"" + port.name + "\"");
    return value.get();
  }

  // Members are destroyed from last to first: first the session, then the memory information, the
  // environment and the device.
  const Log log_;
  const GraphSpec graph_;
  const std::string path_;          // path of the graph that runs
  const Provider* const provider_;  // the execution provider that runs the graph; nullptr: the CPU
  const OrtLibrary library_;
  std::optional<CudaDevice> device_;
  std::string left_;  // result of left_behind(): the nodes that the provider does not run
  Owned<OrtEnv, ort::ReleaseEnv> env_;
  Owned<OrtMemoryInfo, ort::ReleaseMemoryInfo> memory_, device_memory_;
  std::optional<CustomOps> custom_ops_;
  std::string kernels_;  // name of the kernel set; empty if our kernels are not used
  Owned<OrtSession, ort::ReleaseSession> session_;
  Ports ports_;
  const bool has_window_ = window_of(cache_) > 0;
  bool has_segments_ = false;               // the graph has the input "segments"
  bool chooses_rows_ = false;               // the graph has the inputs that choose cached rows
  std::optional<DrawingPasses> drawing_;    // if there is a device
  std::optional<CapturedPasses> captured_;  // if passes run as CUDA graphs
  std::mutex capturing_;
  std::vector<const char*> input_names_;
};

}  // namespace

std::unique_ptr<Engine> open_onnxruntime(const GraphSpec& graph, const std::string& library,
                                         int threads, const ProviderChoice& provider,
                                         const Log& log) {
  return std::make_unique<OnnxRuntime>(graph, library, threads, provider, log);
}

}  // namespace dlm
