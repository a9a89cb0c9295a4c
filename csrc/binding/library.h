// A path's shared library (libflash_ext_<path>.so): loaded when first needed, its functions behind one table.
#pragma once

#include <pybind11/pybind11.h>
#include <stdint.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "api/abi.h"
#include "api/settings.h"

namespace flash_ext {

// Directory of the libraries: FLASH_EXT_LIBRARY_DIR, or the package's own folder.
std::string library_dir();

// Where the library of a path is looked for.
std::string library_file(std::string_view path);

// Paths whose library file exists in library_dir().
std::vector<std::string> available_paths();

// Every member function needs the GIL unless it says otherwise: it is what guards the caches.
class Library {
  public:
    // The library of a path, loaded on the first call. Raises ValueError for a name that is no path, RuntimeError if
    // the file is missing, cannot be loaded or was built for another ABI version.
    static Library& get(std::string_view path);

    // From now on only kernels with this tile (0, 0: any), in libraries that are loaded already, too.
    static void force_tile(int32_t block_m, int32_t block_n);

    const std::string& path() const { return path_; }
    const KernelInfo& kernel(int32_t index) const { return kernels_[index]; }
    int32_t kernel_count() const { return kernel_count_; }
    const char* build_info() const { return build_info_(); }

    // The index of the kernel for the query, or -1 with the reason. Successes are cached.
    int32_t choose(const KernelQuery& query, std::string* reason);

    // Cached; raises RuntimeError if the device cannot be used.
    const DeviceInfo& device_info(int32_t device);

    // These three do not touch Python.
    int32_t set_device(int32_t device, int32_t* previous) const { return set_device_(device, previous); }
    int64_t workspace(int32_t kernel, const void* params, const LaunchContext& context) const {
        return workspace_(kernel, params, &context);
    }
    int32_t launch(int32_t kernel, const void* params, const LaunchContext& context) const {
        return launch_(kernel, params, &context);
    }
    int32_t probe(float* data, int64_t count, float value, const LaunchContext& context) const {
        return probe_(data, count, value, &context);
    }

    // RuntimeError "flash_ext: kernel <name> failed: cudaErrorName (text)".
    [[noreturn]] void raise_cuda_error(const std::string& what, int32_t error) const;

  private:
    explicit Library(std::string_view path);

    static std::vector<std::unique_ptr<Library>>& loaded();

    // Packed into three words for hashing.
    struct Key {
        uint64_t kind;  // direction, dtype, device
        uint64_t head_dims;
        uint64_t features;
        bool operator==(const Key& other) const {
            return kind == other.kind && head_dims == other.head_dims && features == other.features;
        }
    };
    struct KeyHash {
        size_t operator()(const Key& key) const {
            return ((key.kind * 31 + key.head_dims) * 0x9E3779B97F4A7C15ull) ^ (key.features * 0xC2B2AE3D27D4EB4Full);
        }
    };

    std::string path_;
    const KernelInfo* kernels_ = nullptr;
    int32_t kernel_count_ = 0;
    std::unordered_map<Key, int32_t, KeyHash> choices_;
    std::map<int32_t, DeviceInfo> devices_;

    decltype(&flash_ext_configure) configure_ = nullptr;
    decltype(&flash_ext_build_info) build_info_ = nullptr;
    decltype(&flash_ext_device_info) device_info_ = nullptr;
    decltype(&flash_ext_choose) choose_ = nullptr;
    decltype(&flash_ext_set_device) set_device_ = nullptr;
    decltype(&flash_ext_workspace) workspace_ = nullptr;
    decltype(&flash_ext_launch) launch_ = nullptr;
    decltype(&flash_ext_probe) probe_ = nullptr;
    decltype(&flash_ext_error_name) error_name_ = nullptr;
    decltype(&flash_ext_error_string) error_string_ = nullptr;
};

}  // namespace flash_ext
