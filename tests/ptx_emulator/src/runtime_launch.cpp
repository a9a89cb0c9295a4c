// Kernel launches and function attributes of the stand-in.
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <xmmintrin.h>

#include "host_faults.h"
#include "kernel_library.h"
#include "runtime.h"

namespace ptx_emulator {

namespace {

struct CallConfiguration {
    dim3 grid, block;
    size_t shared = 0;
    cudaStream_t stream = nullptr;
};
thread_local std::vector<CallConfiguration> call_configurations;

// Functions that allow clusters of more than 8 CTAs (cudaFuncAttributeNonPortableClusterSizeAllowed).
std::set<const void*>& large_clusters() {
    static auto* functions = new std::set<const void*>;
    return *functions;
}

std::map<const void*, int>& shared_limits() {
    static auto* limits = new std::map<const void*, int>;
    return *limits;
}

Dim3 convert(dim3 d) {
    return {d.x, d.y, d.z};
}

// Kernels see IEEE arithmetic with subnormals whatever the process has set.
class FloatingPointGuard {
  public:
    FloatingPointGuard() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~FloatingPointGuard() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
};

void run_guarded(Machine& machine) {
    const FloatingPointGuard floating_point;
    void* fault_address = nullptr;
    // After a fault the machine itself is intact and is destroyed as usual.
    if (survives_faults([&] { machine.run(); }, &fault_address)) return;
    std::string text =
        format("illegal access of global memory at %p in kernel %s", fault_address, machine.program.name.c_str());
    if (const Warp* warp = machine.current_warp) {
        text += format("\n  CTA (%u,%u,%u) warp %u at %s", warp->cta.id.x, warp->cta.id.y, warp->cta.id.z, warp->index,
                       machine.program.where(warp->pc()).c_str());
    }
    throw EmulationError(Fault::kIllegalAddress, text);
}

// The arguments by the PTX's parameters; nothing but the text says how many the caller has.
void copy_parameters(const Program& program, void** arguments, std::vector<uint8_t>& parameters) {
    parameters.assign(program.parameter_bytes, 0);
    for (size_t i = 0; i < program.parameters.size(); ++i) {
        const ParameterSyntax& parameter = program.parameters[i];
        void* address = nullptr;
        const auto copy = [&] { std::memcpy(&parameters[parameter.offset], arguments[i], parameter.bytes); };
        if (survives_faults(copy, &address)) continue;
        raise(Fault::kInvalidArgument,
              "kernel %s: parameter %zu of %zu (%u bytes) cannot be read from %p; is the PTX of another build than the "
              "object file?",
              program.name.c_str(), i, program.parameters.size(), parameter.bytes, address);
    }
}

constexpr size_t kMaxEarlierGrids = 4;
std::vector<std::shared_ptr<const GridAccesses>> earlier_grids;  // that a programmatic launch may overlap

}  // namespace

DeviceModel current_device_model() {
    return DeviceModel::from_environment(KernelLibrary::instance().default_capability());
}

int dynamic_shared_limit(const void* host_function) {
    const auto it = shared_limits().find(host_function);
    return it == shared_limits().end() ? 48 * 1024 : it->second;
}

void launch(const void* host_function, Dim3 grid, Dim3 block, Dim3 cluster, size_t dynamic_shared, void** arguments,
            bool programmatic) {
    const std::lock_guard<std::mutex> lock(launch_mutex());
    const char* name = kernel_name(host_function);
    if (!name) raise(Fault::kMissingKernel, "launch of a function that no object registered");
    const Options options = Options::from_environment();
    const Program& program = KernelLibrary::instance().program(name, options);
    const DeviceModel device = current_device_model();
    LaunchConfig config;
    config.grid = grid;
    config.block = block;
    config.cluster = cluster;
    if (cluster.count() <= 1 && program.required_cluster[0]) {
        config.cluster = {program.required_cluster[0], program.required_cluster[1], program.required_cluster[2]};
    }
    if (config.cluster.count() > 8 && !large_clusters().count(host_function)) {
        raise(Fault::kInvalidConfiguration,
              "a cluster of %llu CTAs without cudaFuncAttributeNonPortableClusterSizeAllowed",
              static_cast<unsigned long long>(config.cluster.count()));
    }
    const size_t shared = dynamic_shared + program.static_shared;
    const auto limit = static_cast<size_t>(dynamic_shared_limit(host_function));
    if ((shared > 48 * 1024 && dynamic_shared > limit) || dynamic_shared > UINT32_MAX) {
        raise(Fault::kInvalidConfiguration,
              "%zu bytes of dynamic shared memory, but cudaFuncAttributeMaxDynamicSharedMemorySize is %zu",
              dynamic_shared, limit);
    }
    config.dynamic_shared = static_cast<uint32_t>(dynamic_shared);
    copy_parameters(program, arguments, config.parameters);
    // A programmatic launch may overlap its predecessor, and whatever that one was allowed to overlap.
    if (!programmatic) earlier_grids.clear();
    note_launch(name, nullptr);
    std::unique_ptr<GlobalJournal> first;
    std::shared_ptr<const GridAccesses> accesses;
    for (size_t run = 0; run < options.schedules.size(); ++run) {
        Options here = options;
        here.schedule = options.schedules[run];
        Machine machine(program, config, device, here);
        const bool several = options.schedules.size() > 1;
        if (several) machine.journal = std::make_unique<GlobalJournal>();
        machine.checker.set_primaries(earlier_grids);
        if (options.count && run == 0) {
            const auto warps = static_cast<uint32_t>((block.count() + kWarpSize - 1) / kWarpSize);
            machine.counts = std::make_unique<ExecutionCounts>(program, warps);
        }
        run_guarded(machine);
        note_launch(name, &machine.statistics);
        if (machine.counts) note_counts(name, machine.statistics, *machine.counts);
        if (machine.forms) {
            machine.forms->note_opcodes(program);
            machine.forms->append_to(options.forms_file);
        }
        accesses = machine.checker.take_accesses();
        if (options.trace) {
            std::fprintf(stderr, "PTX emulator: %s: %s, %u CTAs, %u resident, %llu warp instructions\n", name,
                         name_of(here.schedule), machine.statistics.ctas, machine.statistics.resident_ctas,
                         static_cast<unsigned long long>(machine.statistics.warp_instructions));
        }
        if (!several) continue;
        machine.journal->undo();
        if (!first) {
            first = std::move(machine.journal);
            continue;
        }
        const std::string difference = first->difference(*machine.journal);
        if (!difference.empty()) {
            raise(Fault::kHazard, "hazard: the results of kernel %s depend on the schedule, %s or %s\n  %s", name,
                  name_of(options.schedule), name_of(here.schedule), difference.c_str());
        }
        if (run + 1 == options.schedules.size()) machine.journal->redo();
    }
    if (earlier_grids.size() == kMaxEarlierGrids) earlier_grids.erase(earlier_grids.begin());
    earlier_grids.push_back(std::move(accesses));
}

}  // namespace ptx_emulator

using namespace ptx_emulator;

extern "C" {

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    call_configurations.push_back({grid, block, shared, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (call_configurations.empty()) return set_last_error(cudaErrorInvalidConfiguration);
    const CallConfiguration configuration = call_configurations.back();
    call_configurations.pop_back();
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *static_cast<cudaStream_t*>(stream) = configuration.stream;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t) {
    return guarded([&] { launch(function, convert(grid), convert(block), {}, shared, arguments, false); });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared, stream);
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                    cudaStream_t stream) {
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    Dim3 cluster;
    bool programmatic = false;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            programmatic = config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
        }
        if (config->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
        const auto& dimension = config->attrs[i].val.clusterDim;
        cluster = {dimension.x, dimension.y, dimension.z};
    }
    return guarded([&] {
        launch(function, convert(config->gridDim), convert(config->blockDim), cluster, config->dynamicSmemBytes,
               arguments, programmatic);
    });
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    return guarded([&] {
        if (!kernel_name(function)) raise(Fault::kMissingKernel, "cudaFuncSetAttribute of an unknown function");
        if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed && value) {
            const std::lock_guard<std::mutex> lock(launch_mutex());
            large_clusters().insert(function);
        }
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return;
        const auto limit = static_cast<int>(current_device_model().shared_per_cta);
        if (value < 0 || value > limit) {
            raise(Fault::kInvalidConfiguration, "%d bytes of dynamic shared memory, the device has %d", value, limit);
        }
        const std::lock_guard<std::mutex> lock(launch_mutex());
        shared_limits()[function] = value;
    });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    return guarded([&] {
        const char* name = kernel_name(function);
        if (!name) raise(Fault::kMissingKernel, "cudaFuncGetAttributes of an unknown function");
        const std::lock_guard<std::mutex> lock(launch_mutex());
        const Program& program = KernelLibrary::instance().program(name, Options::from_environment());
        *attributes = cudaFuncAttributes{};
        attributes->sharedSizeBytes = program.static_shared;
        attributes->maxThreadsPerBlock = program.max_threads[0] ? static_cast<int>(program.max_threads[0]) : 1024;
        attributes->localSizeBytes = program.local_bytes;
        attributes->maxDynamicSharedSizeBytes = dynamic_shared_limit(function);
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t shared) {
    return guarded([&] {
        const char* name = kernel_name(function);
        if (!name) raise(Fault::kMissingKernel, "occupancy of an unknown function");
        const std::lock_guard<std::mutex> lock(launch_mutex());
        const Program& program = KernelLibrary::instance().program(name, Options::from_environment());
        *blocks = static_cast<int>(current_device_model().occupancy(
            static_cast<uint32_t>(threads), static_cast<uint32_t>(shared) + program.static_shared));
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t shared, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const cudaLaunchConfig_t* config) {
    uint32_t size = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
        const auto& dimension = config->attrs[i].val.clusterDim;
        size = dimension.x * dimension.y * dimension.z;
    }
    int blocks = 0;
    const auto threads = static_cast<int>(config->blockDim.x * config->blockDim.y * config->blockDim.z);
    const cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, config->dynamicSmemBytes);
    if (error != cudaSuccess) return error;
    return guarded(
        [&] { *clusters = blocks * static_cast<int>(current_device_model().sm_count) / static_cast<int>(size); });
}
}
