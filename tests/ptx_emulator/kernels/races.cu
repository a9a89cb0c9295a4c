// Kernels with a hazard, and their correct twins: the checker must report the first and be silent on the second.
#include <stdint.h>

extern "C" {

// Neighbouring warps exchange through shared memory. correct: with the barrier.
__global__ void shared_exchange(const int* in, int* out, int correct) {
    __shared__ int values[128];
    const int t = threadIdx.x;
    values[t] = in[t];
    if (correct) __syncthreads();
    out[t] = values[(t + 32) % 128];
}

// Lanes of one warp exchange through shared memory. correct: with bar.warp.sync.
__global__ void lane_exchange(const int* in, int* out, int correct) {
    __shared__ int values[32];
    const int t = threadIdx.x;
    values[t] = in[t];
    if (correct) __syncwarp();
    out[t] = values[(t + 1) % 32];
}

// The same location read, then written by another warp. correct: with a barrier between.
__global__ void write_after_read(const int* in, int* out, int correct) {
    __shared__ int value;
    if (threadIdx.x == 0) value = in[0];
    __syncthreads();
    const int seen = value;
    if (correct) __syncthreads();
    if (threadIdx.x == 64) value = seen + 1;
    __syncthreads();
    out[threadIdx.x] = value + seen;
}

// Two CTAs add into the same global location. correct: atomically.
__global__ void global_add(int* out, int correct) {
    if (threadIdx.x != 0) return;
    if (correct) {
        atomicAdd(out, 1);
    } else {
        *out = *out + 1;
    }
}

// Two CTAs add floats into the same location; ordered: CTA 1 waits for CTA 0.
__global__ void float_add(float* out, int* turn, int ordered) {
    if (threadIdx.x != 0) return;
    if (ordered) {
        int seen = 0;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
        } while (seen != blockIdx.x);
    }
    atomicAdd(out, 1.0f);
    if (ordered) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(blockIdx.x + 1) : "memory");
}

// CTA 0 hands a value to CTA 1 through a flag. correct: with a release and an acquire; else with relaxed accesses.
__global__ void hand_over(int* data, int* flag, int* out, int correct) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        data[0] = 42;
        if (correct == 1) {
            asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
        } else {
            if (correct == 2) __threadfence();
            asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
        }
    } else {
        int seen = 0;
        while (!seen) {
            if (correct == 1) {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
            } else {
                asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
            }
        }
        if (correct == 2) __threadfence();
        out[0] = data[0];
    }
}

// One thread writes plainly, the others read with ld.volatile: strong, but not ordered. correct: with the barrier.
__global__ void volatile_read(const int* in, int* out, int correct) {
    __shared__ int value;
    if (threadIdx.x == 0) value = in[0];
    if (correct) __syncthreads();
    out[threadIdx.x] = *const_cast<volatile int*>(&value);
}

// Shared memory that nothing has written is read. correct: it is written first.
__global__ void unwritten_shared(int* out, int correct) {
    extern __shared__ int buffer[];
    if (correct) buffer[threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = buffer[(threadIdx.x + 1) % blockDim.x];
}

// ---- faults
__global__ void out_of_shared(int* out, int index) {
    __shared__ int values[32];
    values[threadIdx.x] = 1;
    __syncthreads();
    out[0] = values[index];
}

__global__ void wild_pointer(int* out) {
    out[int64_t{1} << 40] = 1;
}

__global__ void misaligned(const char* in, int4* out) {
    out[0] = *reinterpret_cast<const int4*>(in + 4);
}

// Warp 0 waits at a barrier that warp 1 never reaches.
__global__ void deadlock(int* out) {
    if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 64;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 64;" ::: "memory");
    }
    out[threadIdx.x] = 1;
}

// A CTA waits for a CTA that starts only when it has ended.
__global__ void wait_for_last(int* flag, int* out) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == gridDim.x - 1) atomicExch(flag, 1);
    while (atomicAdd(flag, 0) == 0) {
    }
    out[blockIdx.x] = 1;
}

}  // extern "C"
