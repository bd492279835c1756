// The interface between the loop and the engines that run the denoiser.
//
// An Engine holds the weights; threads share it. Each session opens a Context, which owns the
// session's buffers and its cache of keys and values, in the engine's kind of memory. The loop only
// says how a pass uses the cache; it never sees the bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/segment.h"
#include "dlm_runtime.h"

namespace dlm {

// A layer's keys (or values) are [B, kv_heads, rows, head_size]; each int8 row ends with its scale.
struct CacheLayer {
  int32_t kv_heads, head_size, element_bytes, scale_bytes = 0;

  size_t row_bytes() const { return static_cast<size_t>(head_size) * element_bytes + scale_bytes; }
  size_t tensor_bytes(int32_t batch, int32_t rows) const {
    return static_cast<size_t>(batch) * kv_heads * rows * row_bytes();
  }
};

// One entry per layer.
using CacheShape = std::vector<CacheLayer>;

// The denoiser's properties that the loop needs, checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, top_k, shift;
  bool has_cache;
  CacheShape cache;  // at least one layer, but unused if has_cache is false
  std::vector<int32_t> eos_token_ids;
  int32_t visible_block = 0;     // 0: attention is full
  int32_t max_new_tokens = 128;  // default of a request

  bool is_end(int32_t token) const {
    return std::find(eos_token_ids.begin(), eos_token_ids.end(), token) != eos_token_ids.end();
  }
};

// How a pass uses its context's cache.
enum class CacheUse {
  none,     // S is 0; the T new rows are discarded
  write,    // S is 0; the T new rows are stored for keep_outside, and all others dropped; sets B
  read,     // reads the S rows that keep_outside kept
  refresh,  // reads them too, and stores the T new rows
  append    // reads positions [0, S), if any; stores only the T new rows, after them
};

// True if the new rows are stored.
constexpr bool keeps_rows(CacheUse use) { return use != CacheUse::none && use != CacheUse::read; }

// The rows to allocate if `rows` are needed. Room doubles, so rows are copied only a few times, but
// it does not exceed the longest canvas.
inline int32_t grown(int32_t capacity, int32_t rows, int32_t longest) {
  return std::max(rows, capacity > longest / 2 ? longest : 2 * capacity);
}

// The pointers of a pass to the keys and values of all layers.
class KeyValues {
 public:
  explicit KeyValues(size_t layers) : nothing_(layers) {
    for (const int i : {0, 1}) past_[i].resize(layers), present_[i].resize(layers);
  }

  // Tensors 2i and 2i + 1 are the keys and the values of layer i.
  void set_past(size_t tensor, const void* rows) { past_[tensor % 2][tensor / 2] = rows; }
  void set_present(size_t tensor, void* rows) { present_[tensor % 2][tensor / 2] = rows; }

  // Sets the fields of a pass. They stay valid until the object is destroyed.
  void put(dlm_pass& pass, bool has_past, bool has_present) const {
    pass.layers = static_cast<int32_t>(nothing_.size());
    pass.past_keys = (has_past ? past_[0] : nothing_).data();
    pass.past_values = (has_past ? past_[1] : nothing_).data();
    pass.present_keys = has_present ? present_[0].data() : nullptr;
    pass.present_values = has_present ? present_[1].data() : nullptr;
  }

 private:
  std::vector<const void*> nothing_, past_[2];  // nothing_: NULL for every layer
  std::vector<void*> present_[2];
};

class Context {
 public:
  virtual ~Context() = default;

  // Runs one pass over contiguous positions, the same for each request of the batch. The caller
  // sets everything in it except `layers` and the keys and values; the context sets these. Throws
  // Error(DLM_ENGINE_FAILED) or any other error that ends the request.
  virtual void run(const dlm_pass& pass, CacheUse use) = 0;

  // Later passes read the rows of the positions outside [first, last), in any order, because keys
  // include their positions. These rows must be stored, or from the last pass.
  virtual void keep_outside(int32_t first, int32_t last) = 0;

  // Current bytes of the batch's keys and values, of the canvas or of the appended rows.
  virtual uint64_t cache_bytes() const = 0;
};

class Arena;

class Engine {
 public:
  virtual ~Engine() = default;

  // Opens a context for one thread at a time. The engine must outlive it. `longest`: the most rows
  // of an appended cache, the denoiser's max_canvas_length.
  virtual std::unique_ptr<Context> open_context(int32_t longest) = 0;

  // True if requests may share a pass as segments. Otherwise they run in lockstep.
  virtual bool takes_segments() const { return false; }

  // Opens `rows` key/value rows for shared passes; NULL without them. The engine must outlive it.
  virtual std::unique_ptr<Arena> open_arena(int64_t rows);

  // One line for people: name, version, provider.
  virtual std::string description() const = 0;

  // The most rows that a pass of T `tokens` over S `cached` ones may score; 0: no such pass.
  virtual int32_t max_rows(int32_t /*tokens*/, int32_t /*cached*/) const { return INT32_MAX; }

  // The most requests in a pass (B).
  virtual int32_t max_batch() const { return INT32_MAX; }

  // The sizes that limit max_rows, for people; "" if there is no limit.
  virtual std::string limits() const { return ""; }
};

// An engine that finds all buffers of a pass in dlm_pass. Its contexts own the cache and set the
// pass's pointers to it. The cache is in host memory, unless the engine opens other contexts.
class HostEngine : public Engine {
 public:
  explicit HostEngine(CacheShape cache) : cache_(std::move(cache)) {}

  std::unique_ptr<Context> open_context(int32_t longest) override;
  std::unique_ptr<Arena> open_arena(int64_t rows) override;

  // Runs a pass with all of dlm_pass set; several contexts may call it at once. segments: of the
  // tokens, with B = 1 and S = all rows; empty if the requests are those of B.
  virtual void run(const dlm_pass& pass, const std::vector<Segment>& segments) = 0;

 protected:
  const CacheShape cache_;
};

// The graph's names for the inputs and outputs of a pass.
struct PortNames {
  struct Layer {
    std::string past_key, past_value, present_key, present_value;
  };
  std::string input_ids, position_ids, score_rows, top_token, top_prob, entropy, logits;
  std::string segments{};  // "": the graph has no such input
  std::vector<Layer> layers{};
};

// The manifest's description of a bundle's graph, for engines.
struct GraphSpec {
  std::string path;         // of denoiser.onnx
  std::string device_path;  // of device.onnx, the same graph for GPUs; may be empty
  int32_t vocab_size, top_k;
  CacheShape cache;
  int32_t cache_type;  // an element type of engines/graph_contract.h
  bool simulated;      // computes on quantised values in floating point, as the graph is written
  PortNames ports;     // with as many layers as `cache`
};

// The smallest, best and largest value of a size in an engine's profile.
struct Sizes {
  int32_t smallest, best, largest;
};

// The passes that one profile of a TensorRT engine accepts.
struct Profile {
  Sizes tokens, cached, rows;
};

// A compute capability as people write it: 89 is "8.9".
inline std::string sm_text(int32_t sm) {
  return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

// One of a bundle's TensorRT engines, from the manifest.
struct EngineSpec {
  std::string target, path, builder, version;  // builder: "tensorrt" or "tensorrt_rtx"
  std::string bundle;                          // its folder, for messages
  std::vector<int32_t> sm;                     // compute capabilities that can run it, 89 = 8.9
  Profile prefill, block;                      // profiles 0 and 1
};

// The ONNX Runtime provider that runs the graph; the fields of dlm_open_options.
struct ProviderChoice {
  std::string name = "cpu";
  int32_t device = 0;
  bool allow_fallback = false;

  bool is_gpu() const { return name != "cpu"; }
};

// Loads libonnxruntime (`library`, or the places that dlm_open_options lists) and the graph.
// threads = 0: all cores. Throws Error(DLM_ENGINE_MISSING) if the library, its provider or a
// dependency is missing, DLM_UNSUPPORTED if nodes would run on the CPU without permission.
std::unique_ptr<Engine> open_onnxruntime(const GraphSpec& graph, const std::string& library,
                                         int threads, const ProviderChoice& provider);

// Loads TensorRT (`library`, or the places that dlm_open_options lists) and the engine that fits it
// and the device. Throws Error(DLM_ENGINE_MISSING), or Error(DLM_UNSUPPORTED) if no engine fits.
std::unique_ptr<Engine> open_tensorrt(const GraphSpec& graph,
                                      const std::vector<EngineSpec>& engines,
                                      const std::string& library);

// A row with a NaN or +inf logit gets NaN probabilities, which end its request.
std::unique_ptr<HostEngine> make_callback(dlm_pass_fn run, void* user, const Denoiser& denoiser);

// For bundles that are only inspected: every pass throws Error(DLM_UNSUPPORTED).
std::unique_ptr<Engine> make_none(CacheShape cache);

}  // namespace dlm
