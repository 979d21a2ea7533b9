"""python prefetch.py GRAPHS: do weights that are fetched into the L2 cache ahead of their kernels make a step faster?"""
import sys, time, statistics, random
sys.path[:0]=['.','benchmarks']
from pathlib import Path
import numpy as np, torch, cupy
import models
from msplit import api, rules
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda import executable as ex
from msplit.engines.cuda.engine import CudaEngine
from msplit.inputs.make import make_inputs
SRC=r'''
extern "C" __global__ void fetch(const unsigned long long* table, int n, long long clocks, long long total) {
  long long t0 = clock64(); unsigned long long done = 0;
  for (int i = 0; i < n; i++) {
    unsigned long long a = table[2*i]; unsigned int b = (unsigned int)table[2*i+1];
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(a), "r"(b) : "memory");
    done += b;
    long long due = (long long)((double)clocks * done / total);
    while (clock64() - t0 < due) __nanosleep(64);
  }
}'''
fetch=cupy.RawKernel(SRC,'fetch')
MODE={'us':0}
CHUNK=32768
def table(self):
    rows=[]; seen=set()
    for action in self.lanes.actions:
        step=self.program.steps[action.step]
        for key in step.inputs:
            c=self.program.constants.get(key)
            if isinstance(c,torch.Tensor) and c.is_cuda and c.nbytes>=4096 and c.data_ptr() not in seen:
                seen.add(c.data_ptr()); n=c.nbytes//16*16
                rows+= [(c.data_ptr()+k,min(CHUNK,n-k)) for k in range(0,n,CHUNK)]
    return rows
orig=ex.CudaExecutable._record
def record(self,make_tap=None):
    us=MODE['us']
    if not us: return orig(self,make_tap)
    rows=table(self)
    if not hasattr(self,'_tab') :
        self._tab=torch.tensor(rows,dtype=torch.int64,device=self.device); self._side=torch.cuda.Stream(); torch.cuda.synchronize()
    e=torch.cuda.Event(); e.record(self._origin); self._side.wait_event(e)
    with cupy.cuda.ExternalStream(self._side.cuda_stream):
        fetch((1,),(1,),(self._tab.data_ptr(),np.int32(len(rows)),np.int64(us*1980),np.int64(sum(r[1] for r in rows))))
    r=orig(self,make_tap)
    self._origin.wait_stream(self._side)
    return r
ex.CudaExecutable._record=record
graphs=Path(sys.argv[1])
for name,batch in (('inception_v3',1),('bert',1),('googlenet',1),('nasnet_mobile',1)):
    flat=api.load(models.fill(graphs,Path('/tmp/msplit-models'),name,batch)); sizes,costs=price(flat,batch=batch); feeds=make_inputs(flat,{},batch=batch,seed=0)
    engine=CudaEngine(); runs={}
    guess={'inception_v3':480,'bert':150,'googlenet':215,'nasnet_mobile':550}[name]
    for streams in (1,8):
        ids=api.assign(flat,rules.load(models.RULES[name],streams=streams),priced=(sizes,costs)).ids
        for label,options in (('plain',{}),('fused+grouped',{'fuse':True,'group':True})):
            if (streams,label)==(1,'fused+grouped') and name!='bert': continue
            for share in (0,0.5,0.8,1.0):
                MODE['us']=share*guess*(1.5 if streams==1 else 1)
                runs[streams,label,share]=engine.build(Job(flat,ids,streams,feeds,options=options,costs=costs))
    MODE['us']=0
    times={k:[] for k in runs}
    for _ in range(6):
        ks=list(runs); random.shuffle(ks)
        for k in ks: times[k]+=list(runs[k].device_times(30))[3:]
    some=next(iter(runs.values())); rows=table(some)
    print(name,batch,'weights',sum(r[1] for r in rows)/1e6,'MB',len(rows),'chunks')
    for k,v in times.items(): print('  ',k,f'{1e6*statistics.median(v):.1f} us', f'host {1e6*statistics.median([time_step(runs[k],feeds) for _ in range(40)]) if False else 0:.0f}',flush=True)
    for r in runs.values(): r.close()
