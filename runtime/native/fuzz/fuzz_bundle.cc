// A fuzz target that opens a bundle with any text as its manifest. Opening must either fail with an
// error message, or give a bundle for which every query works.
//
// The input is manifest.json, followed by a NUL and the contents of the listed files. The target
// cuts the content of each file to the listed size, or pads it with zeros. If the manifest contains
// 64 letters "a", the target replaces them with the SHA-256 of the first file. Otherwise the hash
// check would always fail, and the fuzzer would never test the code after the check.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/sha256.h"
#include "fuzz.h"

namespace {

constexpr size_t kMostFiles = 8, kMostBytes = 1 << 16;

// A temporary folder, in memory if possible. The folder is removed when the program ends normally.
struct Folder {
  Folder() {
    std::string name =
        std::filesystem::exists("/dev/shm") ? "/dev/shm/dlm-fuzz-XXXXXX" : "/tmp/dlm-fuzz-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::perror(name.c_str()), std::exit(1);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

const std::filesystem::path& folder() {
  static const Folder made;
  return made.path;
}

// Returns true for the file names that the target may create.
bool is_plain(const std::string& name) {
  const auto is_word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '/';
  };
  return !name.empty() && name.size() < 64 && name.front() != '/' && name.back() != '/' &&
         name.find("..") == std::string::npos && name.find("//") == std::string::npos &&
         name != "manifest.json" && std::all_of(name.begin(), name.end(), is_word);
}

// Returns the listed files that the target may create because they are small enough.
std::vector<std::pair<std::string, size_t>> listed(const std::string& manifest) {
  std::vector<std::pair<std::string, size_t>> found;
  try {
    const auto root = dlm::json::parse(manifest, kMostBytes);
    for (const auto& entry : root->object("files").members())
      if (is_plain(entry.key()) && found.size() < kMostFiles)
        found.emplace_back(entry.key(), static_cast<size_t>(entry.integer(
                                            "bytes", 0, static_cast<int64_t>(kMostBytes))));
  } catch (const dlm::Error&) {
  }
  return found;
}

std::string hash_of(const std::string& content) {
  dlm::Sha256 hash;
  hash.update(content.data(), content.size());
  return hash.hex();
}

void write(std::string manifest, std::string_view content) {
  std::filesystem::remove_all(folder());
  std::filesystem::create_directory(folder());
  std::string first;
  for (const auto& [name, bytes] : listed(manifest)) {
    std::string own(content.substr(0, bytes));
    own.resize(bytes);
    std::error_code ignored;  // fails if a file exists where a folder is needed
    std::filesystem::create_directories((folder() / name).parent_path(), ignored);
    std::ofstream(folder() / name, std::ios::binary) << own;
    if (first.empty()) first = hash_of(own);
  }
  const std::string stands(64, 'a');
  for (size_t at = 0; !first.empty() && (at = manifest.find(stands, at)) != std::string::npos;
       at += 64)
    manifest.replace(at, 64, first);
  std::ofstream(folder() / "manifest.json", std::ios::binary) << manifest;
}

void ask(dlm_bundle* bundle) {
  char message[2048];
  const dlm_bundle_info& info = *dlm_bundle_describe(bundle);
  const dlm_denoiser& denoiser = *info.denoiser;
  CLAIM(denoiser.vocab_size >= 3 && denoiser.mask_token_id < denoiser.vocab_size &&
        denoiser.layers >= 1);
  CLAIM(*info.manifest != '\0' && *info.engine != '\0');
  dlm_policy policy;
  dlm_policy_init(&policy, sizeof policy);
  CLAIM(dlm_bundle_policy(bundle, nullptr, nullptr, message, sizeof message, &policy) == DLM_OK);
  CLAIM(dlm_bundle_policy(bundle, "no such", nullptr, message, sizeof message, &policy) ==
            DLM_NOT_FOUND &&
        fuzz::is_sentence(message));
  for (const char* const level : {"instant", "low", "medium", "high", "most"}) {
    const dlm_status status =
        dlm_bundle_policy(bundle, nullptr, level, message, sizeof message, &policy);
    CLAIM(status == DLM_OK || status == DLM_NOT_FOUND);
  }
  const dlm_text* text = nullptr;
  const dlm_status status = dlm_bundle_text(bundle, message, sizeof message, &text);
  CLAIM(status == DLM_OK ? text != nullptr
                         : fuzz::is_refusal(status) && fuzz::is_sentence(message));
  dlm_session* session = nullptr;
  // Create a session only for short canvases, because a session for a longer canvas could need much
  // memory.
  if (denoiser.max_canvas_length > 1 << 12) return;
  if (dlm_session_create(bundle, message, sizeof message, &session) != DLM_OK)
    CLAIM(fuzz::is_sentence(message));
  dlm_request request;
  dlm_request_init(&request, sizeof request);
  request.max_new_tokens = 1;
  // This call must fail, because there is no engine.
  CLAIM(dlm_session_generate(session, &request, nullptr) != DLM_OK);
  CLAIM(fuzz::is_sentence(dlm_session_last_error(session)));
  dlm_session_destroy(session);
}

void open(const char* engine, int32_t check_hashes) {
  char message[2048];
  dlm_open_options options;
  dlm_open_options_init(&options, sizeof options);
  options.engine = engine, options.check_hashes = check_hashes;
  dlm_bundle* bundle = nullptr;
  const dlm_status status =
      dlm_bundle_open(folder().c_str(), &options, message, sizeof message, &bundle);
  CLAIM(status == DLM_OK
            ? bundle != nullptr
            : fuzz::is_refusal(status) && fuzz::is_sentence(message) && bundle == nullptr);
  if (status == DLM_OK) ask(bundle);
  dlm_bundle_destroy(bundle);
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string_view whole = input.rest();
  const size_t end = std::min(whole.find('\0'), whole.size());
  write(std::string(whole.substr(0, end)), whole.substr(std::min(end + 1, whole.size())));
  open("none", 0);
  open("none", 1);
  // The library is built without TensorRT, so opening checks only the manifest's entries for
  // engines.
  open("tensorrt", 1);
  return 0;
}
